# SPDX-License-Identifier: MIT
# Run at every build (cmake -DSOURCE=... -DOUTPUT=... -P): writes the commit into a source file, which is compiled again only if it changed.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --exclude=* --abbrev=7
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
    set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
// Written by cmake/Commit.cmake.
#include "model/base/build_info.h"

namespace fp8flow {
const char* build_commit() { return "@commit@"; }
}  // namespace fp8flow
]] @ONLY)
