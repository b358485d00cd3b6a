# SPDX-License-Identifier: MIT
# Makes the template of report.html part of the program: fp8flow_report_page(OUT) sets OUT to a source file.
function(fp8flow_report_page out)
    set(path ${PROJECT_SOURCE_DIR}/model/report/page/page.html)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
    file(READ ${path} page)
    set(written ${PROJECT_BINARY_DIR}/generated/report_page.cpp)
    file(CONFIGURE OUTPUT ${written} CONTENT [[
// Written by cmake/ReportPage.cmake.
#include "model/report/page/page.h"

namespace fp8flow::report {
std::string_view page_template() {
    return R"page(@page@)page";
}
}  // namespace fp8flow::report
]] @ONLY)
    set(${out} ${written} PARENT_SCOPE)
endfunction()
