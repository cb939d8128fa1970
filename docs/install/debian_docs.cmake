# Run by cpack before it makes the packages: each Debian package has its license and
# its list of changes in /usr/share/doc, and a manual page is compressed.

foreach(component ${CPACK_COMPONENTS_ALL})
  string(TOUPPER ${component} upper)
  set(root ${CPACK_TEMPORARY_DIRECTORY}/${component})
  set(docs ${root}/usr/share/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME})
  set(source ${CMAKE_CURRENT_LIST_DIR}/../..)
  file(MAKE_DIRECTORY ${docs})
  configure_file(${source}/LICENSE ${docs}/copyright COPYONLY)
  file(READ ${source}/CHANGELOG.md changes)
  file(WRITE ${docs}/changelog "${changes}")
  file(GLOB manuals ${root}/usr/share/man/man1/*.1)
  execute_process(COMMAND gzip -9nf ${docs}/changelog ${manuals}
                  COMMAND_ERROR_IS_FATAL ANY)
endforeach()
