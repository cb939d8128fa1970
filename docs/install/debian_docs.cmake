# cpack runs this script before it makes the packages: it puts the license and the
# changelog of each Debian package into /usr/share/doc, and compresses manual pages.

foreach(component ${CPACK_COMPONENTS_ALL})
  string(TOUPPER ${component} upper)
  set(root ${CPACK_TEMPORARY_DIRECTORY}/${component})
  set(docs ${root}/usr/share/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME})
  set(source ${CMAKE_CURRENT_LIST_DIR}/../..)
  file(REMOVE_RECURSE ${root}/usr/share/doc)
  file(MAKE_DIRECTORY ${docs})
  configure_file(${source}/LICENSE ${docs}/copyright COPYONLY)
  file(READ ${source}/CHANGELOG.md changes)
  file(WRITE ${docs}/changelog "${changes}")
  file(GLOB manuals ${root}/usr/share/man/man1/*.1)
  execute_process(COMMAND gzip -9nf ${docs}/changelog ${manuals}
                  COMMAND_ERROR_IS_FATAL ANY)
endforeach()
