// SPDX-License-Identifier: MIT
// Pre-tokenised data in llm.c's shard format: a header of 256 little-endian int32 (magic, version, token
// count), then the tokens: uint16 under magic 20240520 version 1 (GPT-2), uint32 under magic 20240801 version
// 7 (Llama 3). Files are read in place; every token id is compared with the vocabulary before it is used
// as an index. Read next: data.h.
#pragma once

#include "model/data/token_stream.h"

namespace fp8flow::data {

// A file belongs to the train part if its name holds "_train", to the held-out part if it holds "_val", each
// followed by '_' or '.', e.g. fineweb_train_000001.bin, tiny_shakespeare_val.bin.
class ShardSource final : public StreamSource {
public:
    // Checks every header and file size. Throws ExitCode::data naming the file and the numbers.
    explicit ShardSource(const Config& config, int64_t check_at_start_bytes = kCheckAtStartBytes);

    std::string description() const override;
};

}  // namespace fp8flow::data
