# SPDX-License-Identifier: MIT
# The version of a library, read from its header. For Nccl.cmake and Cudnn.cmake.

# Sets `out` to MAJOR.MINOR as the macros NAME_MAJOR... of a version header say.
function(fp8flow_header_version out header prefix suffixes)
    set(parts "")
    foreach(suffix ${suffixes})
        file(STRINGS ${header} line REGEX "^#define ${prefix}_${suffix} +[0-9]+")
        if(line MATCHES "([0-9]+) *$")
            list(APPEND parts ${CMAKE_MATCH_1})
        endif()
    endforeach()
    list(JOIN parts "." version)
    set(${out} "${version}" PARENT_SCOPE)
endfunction()
