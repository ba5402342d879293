# Headers, package config and version file, so that find_package(tessera) works from an install folder.
include(CMakePackageConfigHelpers)

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/tessera" DESTINATION include
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS tessera_headers tessera_cuda EXPORT tessera_targets)
install(EXPORT tessera_targets NAMESPACE tessera:: FILE tessera-targets.cmake DESTINATION share/cmake/tessera)

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/tessera-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/package/tessera-config.cmake"
                              INSTALL_DESTINATION share/cmake/tessera)
# Before 1.0 a minor version may break its users; headers do not depend on the processor.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/tessera-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/package/tessera-config.cmake"
              "${PROJECT_BINARY_DIR}/package/tessera-config-version.cmake"
        DESTINATION share/cmake/tessera)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION share/doc/tessera)
