# LLM_COMM_SANITIZE=address (AddressSanitizer and UndefinedBehaviorSanitizer) or thread (ThreadSanitizer).
if(LLM_COMM_SANITIZE STREQUAL "address")
  set(flags -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(LLM_COMM_SANITIZE STREQUAL "thread")
  # It does not know fences, and says so: no code that it is to judge has any.
  set(flags -fsanitize=thread)
elseif(LLM_COMM_SANITIZE)
  message(FATAL_ERROR "LLM_COMM_SANITIZE is '${LLM_COMM_SANITIZE}': give address or thread")
endif()
if(LLM_COMM_SANITIZE)
  add_compile_options(${flags} -fno-omit-frame-pointer -g)
  add_link_options(${flags})
endif()
