# LLM_COMM_SANITIZE=address (AddressSanitizer and UndefinedBehaviorSanitizer) or thread (ThreadSanitizer).
if(LLM_COMM_SANITIZE STREQUAL "address")
  # g++ takes a third of the time for these checks in code that is not optimized, and less is optimized away before it.
  set(flags -fsanitize=address,undefined -fno-sanitize-recover=all -O0)
elseif(LLM_COMM_SANITIZE STREQUAL "thread")
  # It does not know fences, and says so: no code that it is to judge has any.
  set(flags -fsanitize=thread)
elseif(LLM_COMM_SANITIZE)
  message(FATAL_ERROR "LLM_COMM_SANITIZE is '${LLM_COMM_SANITIZE}': give address or thread")
endif()
if(LLM_COMM_SANITIZE)
  # -g1: the lines that a report names, which is all that it takes from -g.
  add_compile_options(${flags} -fno-omit-frame-pointer -g1)
  add_link_options(${flags})
endif()
