# SPDX-License-Identifier: MIT
# Makes files part of the program: fp8flow_embed(OUT NAME FILES...) sets OUT to a source file that defines the list
# NAME of model/base/embedded.h.
function(fp8flow_embed out name)
    set(entries "")
    list(SORT ARGN)
    foreach(path ${ARGN})
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
        get_filename_component(file ${path} NAME_WE)
        file(READ ${path} text)
        string(APPEND entries "        {\"${file}\", R\"embed(${text})embed\"},\n")
    endforeach()
    set(written ${PROJECT_BINARY_DIR}/generated/${name}.cpp)
    file(CONFIGURE OUTPUT ${written} CONTENT [[
// Written by cmake/Embed.cmake.
#include "model/base/embedded.h"

namespace fp8flow {
const std::vector<EmbeddedFile>& @name@() {
    static const std::vector<EmbeddedFile> files = {
@entries@    };
    return files;
}
}  // namespace fp8flow
]] @ONLY)
    set(${out} ${written} PARENT_SCOPE)
endfunction()
