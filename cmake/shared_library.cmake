# llm_comm_shared_library(<target> <version script>)   how the shared libraries of the package are linked: they export what the
#                                                      script says and nothing else, and find each other in their directory
function(llm_comm_shared_library target exports)
  get_filename_component(exports "${exports}" ABSOLUTE)
  # nodelete: threads of it may be running when somebody closes it.
  target_link_options(${target} PRIVATE -Wl,--version-script,${exports} -Wl,--exclude-libs,ALL -Wl,-z,nodelete -Wl,-z,defs)
  set_target_properties(${target} PROPERTIES LINK_DEPENDS "${exports}" CXX_VISIBILITY_PRESET hidden
                        VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON DEFINE_SYMBOL ""
                        BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
  target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endfunction()
