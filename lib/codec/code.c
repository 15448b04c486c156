#include "codec/code.h"

const tagc_code *tagc_code_of(const tagc_code_options *options) {
    return options->sparse ? &tagc_code_topk : &tagc_code_blocks;
}
