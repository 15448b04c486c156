# The man page and the completions of bash and zsh, which the command prints from its own tables.
if(CMAKE_CROSSCOMPILING AND NOT CMAKE_CROSSCOMPILING_EMULATOR)
  return()
endif()
set(pages ${CMAKE_BINARY_DIR}/generated)
foreach(kind man bash zsh)
  install(CODE "execute_process(COMMAND ${CMAKE_CROSSCOMPILING_EMULATOR} \"$<TARGET_FILE:tagc>\" help --${kind}
                                OUTPUT_FILE \"${pages}/tagc.${kind}\" COMMAND_ERROR_IS_FATAL ANY)")
endforeach()
install(FILES ${pages}/tagc.man DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 RENAME tagc.1)
install(FILES ${pages}/tagc.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME tagc)
install(FILES ${pages}/tagc.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _tagc)
