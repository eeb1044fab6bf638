# cmake --install: library, public headers, the program, and a package that find_package(moewave) finds.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moewave)
install(
  TARGETS moewave
  EXPORT moewaveTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(
  EXPORT moewaveTargets
  NAMESPACE moewave::
  DESTINATION ${package_dir})
configure_package_config_file(cmake/moewaveConfig.cmake.in moewaveConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(moewaveConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moewaveConfig.cmake ${PROJECT_BINARY_DIR}/moewaveConfigVersion.cmake
        DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(MOEWAVE_BUILD_TOOLS)
  install(TARGETS moewave-cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
