# cpack runs this script before it makes the packages: it puts the license and the
# changes of each Debian package into /usr/share/doc, and compresses manual pages.

# The date is SOURCE_DATE_EPOCH, if that is set.
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)

foreach(component ${CPACK_COMPONENTS_ALL})
  string(TOUPPER ${component} upper)
  set(root ${CPACK_TEMPORARY_DIRECTORY}/${component})
  set(docs ${root}/usr/share/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME})
  set(source ${CMAKE_CURRENT_LIST_DIR}/../..)
  file(REMOVE_RECURSE ${root}/usr/share/doc)
  file(MAKE_DIRECTORY ${docs})
  configure_file(${source}/LICENSE ${docs}/copyright COPYONLY)
  configure_file(${source}/CHANGELOG.md ${docs}/NEWS COPYONLY)
  file(WRITE ${docs}/changelog
"kvtwin (${CPACK_PACKAGE_VERSION}) unstable; urgency=medium

  * NEWS.gz lists what has changed.

 -- ${CPACK_PACKAGE_CONTACT}  ${date}
")
  file(GLOB manuals ${root}/usr/share/man/man1/*.1)
  execute_process(COMMAND gzip -9nf ${docs}/NEWS ${docs}/changelog ${manuals}
                  COMMAND_ERROR_IS_FATAL ANY)
endforeach()
