# Writes OUT, a header that says which commit of SOURCE is being built; null when SOURCE is no git tree of its own.
# Run at every build; the file is touched only when its text changes.
set(commit "NULL")
find_program(git git)
if(git)
  set(ENV{GIT_OPTIONAL_LOCKS} 0)
  execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --show-toplevel OUTPUT_VARIABLE top ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  get_filename_component(top "${top}" REALPATH)
  get_filename_component(own "${SOURCE}" REALPATH)
  if(NOT failed AND top STREQUAL own) # an unpacked archive may lie inside of somebody else's repository
    execute_process(COMMAND ${git} -C ${SOURCE} describe --always --dirty --abbrev=10 --exclude * OUTPUT_VARIABLE name
                    ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
    if(NOT failed)
      set(commit "\"${name}\"")
    endif()
  endif()
endif()
file(WRITE ${OUT}.new "#define TAGC_COMMIT ${commit}\n")
execute_process(COMMAND ${CMAKE_COMMAND} -E copy_if_different ${OUT}.new ${OUT})
file(REMOVE ${OUT}.new)
