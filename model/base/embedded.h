// SPDX-License-Identifier: MIT
// Files that cmake/Embed.cmake makes part of the program.
#pragma once

#include <string_view>
#include <vector>

namespace fp8flow {

struct EmbeddedFile {
    const char* name;  // without its ending
    std::string_view text;
};
const std::vector<EmbeddedFile>& gpu_files();    // configs/gpus
const std::vector<EmbeddedFile>& suite_files();  // configs/suites
const std::vector<EmbeddedFile>& page_files();   // model/report/page/page.html

}  // namespace fp8flow
