# cmake --install: binaries, static libraries, headers as include/atoll/<folder>/x.h, and a package for
# find_package(Atoll). The prefix may be moved; torch stays where it was, or ATOLL_TORCH_DIR names it.
include(CMakePackageConfigHelpers)
set(ATOLL_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Atoll)

get_property(atoll_libraries GLOBAL PROPERTY ATOLL_LIBRARIES)
get_property(atoll_binaries GLOBAL PROPERTY ATOLL_BINARIES)
install(TARGETS ${atoll_libraries} EXPORT AtollTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT AtollTargets NAMESPACE Atoll:: DESTINATION ${ATOLL_PACKAGE_DIR})
if(atoll_binaries)
  install(TARGETS ${atoll_binaries} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
foreach(library ${atoll_libraries})
  string(REPLACE atoll_ "" folder ${library})
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/atoll/${folder}
    FILES_MATCHING PATTERN "*.h")
endforeach()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/AtollConfig.cmake.in
  ${CMAKE_BINARY_DIR}/AtollConfig.cmake INSTALL_DESTINATION ${ATOLL_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/AtollConfigVersion.cmake COMPATIBILITY ExactVersion)
install(FILES ${CMAKE_BINARY_DIR}/AtollConfig.cmake ${CMAKE_BINARY_DIR}/AtollConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/AtollTorch.cmake ${CMAKE_CURRENT_LIST_DIR}/AtollAbsl.cmake
  DESTINATION ${ATOLL_PACKAGE_DIR})
