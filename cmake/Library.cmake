# SPDX-License-Identifier: MIT
# What other programs link: libfp8flow (operations, exchange, layers; no MPI, no YAML) and libfp8flow_mpi (ranks over MPI), their
# headers below include/fp8flow/, and the CMake package fp8flow. The program, its configurations and documents, and the Python package are
# installed next to them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(FP8FLOW_SANITIZE)
    return()  # an instrumented library would need an instrumented caller
endif()

set(parts fp8flow_core fp8flow_ops fp8flow_comm fp8flow_reference fp8flow_hopper fp8flow_backends fp8flow_layers)
list(TRANSFORM parts REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
file(GLOB bindings CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/bindings/*.cpp)
add_library(fp8flow_shared SHARED ${bindings} ${objects})
target_include_directories(fp8flow_shared PRIVATE ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(fp8flow_shared PRIVATE fp8flow_flags ${parts} PUBLIC fmt::fmt)  # the parts: for what they link
# Where the compiler links its C++ library statically, that copy stays inside: two that share symbols in one process (Python's) break each other.
target_link_options(fp8flow_shared PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL)
set_target_properties(fp8flow_shared PROPERTIES OUTPUT_NAME fp8flow EXPORT_NAME fp8flow VERSION ${PROJECT_VERSION}
                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
target_compile_features(fp8flow_shared INTERFACE cxx_std_20)
target_compile_definitions(fp8flow_shared INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)  # as in Flags.cmake
target_include_directories(fp8flow_shared INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

add_library(fp8flow_shared_mpi SHARED kernels/comm/mpi_group.cpp)
target_link_libraries(fp8flow_shared_mpi PRIVATE fp8flow_flags MPI::MPI_CXX PUBLIC fp8flow_shared)
target_include_directories(fp8flow_shared_mpi PRIVATE ${PROJECT_SOURCE_DIR})
set_target_properties(fp8flow_shared_mpi PROPERTIES OUTPUT_NAME fp8flow_mpi EXPORT_NAME mpi VERSION ${PROJECT_VERSION}
                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} INSTALL_RPATH "$ORIGIN")

install(TARGETS fp8flow_shared fp8flow_shared_mpi EXPORT fp8flow COMPONENT library)
install(EXPORT fp8flow NAMESPACE fp8flow:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fp8flow FILE fp8flowTargets.cmake COMPONENT library)
configure_package_config_file(cmake/fp8flowConfig.cmake.in ${PROJECT_BINARY_DIR}/generated/fp8flowConfig.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fp8flow)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/generated/fp8flowConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/generated/fp8flowConfig.cmake ${PROJECT_BINARY_DIR}/generated/fp8flowConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fp8flow COMPONENT library)

# Headers name each other from the repository's root ("kernels/ops.h"); installed, from the include folder ("fp8flow/kernels/ops.h"), so
# that a caller's own folder kernels/ is never meant.
file(GLOB public_headers RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS kernels/*.h kernels/core/*.h kernels/ops/*.h
     kernels/comm/exchange_groups.h kernels/comm/group_exchange.h kernels/comm/host_layout.h kernels/comm/levels/*.h
     kernels/comm/process_group.h kernels/reference/reference_ops.h kernels/hopper/factory.h kernels/hopper/kernel_choice.h
     kernels/hopper/runtime/device_query.h kernels/backends/*.h layers/*.h layers/flows/*.h layers/lone/*.h layers/schedule/*.h)
install(CODE "
    foreach(header ${public_headers} include/fp8flow/recipe.h)
        file(READ \"${PROJECT_SOURCE_DIR}/\${header}\" text)
        string(REGEX REPLACE \"#include \\\"(kernels|layers)/\" \"#include \\\"fp8flow/\\\\1/\" text \"\${text}\")
        string(REPLACE \"include/fp8flow/\" \"\" place \"\${header}\")
        file(WRITE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}/fp8flow/\${place}\" \"\${text}\")
    endforeach()" COMPONENT library)
install(FILES include/fp8flow/fp8flow.h include/fp8flow/c.h include/fp8flow/plugin.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fp8flow COMPONENT library)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DATADIR}/fp8flow COMPONENT library)

install(TARGETS fp8flow RUNTIME COMPONENT program)
install(DIRECTORY configs docs examples DESTINATION ${CMAKE_INSTALL_DATADIR}/fp8flow COMPONENT program)
install(FILES README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DATADIR}/fp8flow COMPONENT program)
# The Python package, with the library next to it: PYTHONPATH=PREFIX/share/fp8flow/python.
set(package ${CMAKE_INSTALL_DATADIR}/fp8flow/python/fp8flow)
install(DIRECTORY python/fp8flow/ DESTINATION ${package} COMPONENT program FILES_MATCHING PATTERN "*.py")
install(CODE "file(CREATE_LINK ../../../../${CMAKE_INSTALL_LIBDIR}/libfp8flow.so
                   \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${package}/libfp8flow.so\" SYMBOLIC)" COMPONENT program)

if(SKBUILD)  # the Python package (python/pyproject.toml) has the library in one file
    install(FILES $<TARGET_FILE:fp8flow_shared> DESTINATION fp8flow RENAME libfp8flow.so COMPONENT python)
endif()

# `cpack --config BUILD/CPackConfig.cmake`: fp8flow-VERSION-SYSTEM.tar.gz with library, program and what belongs to them in one
# folder, to be unpacked anywhere. What they load is the machine's: docs/operations.md.
set(CPACK_GENERATOR TGZ)
set(CPACK_PACKAGE_VENDOR "fp8flow")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Trains Mixture-of-Experts transformers in an FP8 flow without casts")
set(CPACK_PACKAGE_FILE_NAME "fp8flow-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_COMPONENTS_ALL library program)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_COMPONENT_INCLUDE_TOPLEVEL_DIRECTORY ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_CHECKSUM SHA256)
include(CPack)
