/* Checks the values of `tagc train` against each other. Each row of the table checks its own range. */
#include "options/train_options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Combinations that the engine would refuse, in the words of the command line. */
static tagc_status check_exchange(const tagc_train_options *options) {
    int is_hybrid = options->sharding == TAGC_SHARD_HYBRID;
    if (options->block & (options->block - 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "--block is %lld, allowed: a power of two from 16 to 4096",
                         (long long)options->block);
    if (options->gather >= TAGC_GATHER_DELTA8 && options->sharding != TAGC_SHARD_GRAD)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--gather %s needs --sharding grad, where parameters stay; others have fp32, bf16, "
                         "lossless and int8",
                         tagc_train_word(options, "gather"));
    if (options->bucket_elems != 0 && options->wrap == TAGC_WRAP_MATRIX)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "--bucket-elems is %s, which needs --wrap block: matrices that are units of their own do"
            " not join",
            tagc_train_word(options, "bucket-elems"));
    if (is_hybrid && options->ranks_per_host < 2)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--sharding hybrid needs --ranks-per-host of 2 or more; hosts of one rank"
                         " are --sharding none");
    if (is_hybrid && options->compress != TAGC_POLICY_NONE &&
        (options->exchange == TAGC_EXCHANGE_SKETCH || options->exchange == TAGC_EXCHANGE_PACKED))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--exchange %s does not go with --sharding hybrid, allowed: dense or direct",
                         tagc_train_word(options, "exchange"));
    return TAGC_OK;
}

tagc_status tagc_train_check(const tagc_train_options *options) {
    tagc_gpt2_config config = {0};
    TAGC_TRY(tagc_train_model(options, &config));
    if (options->seq_len > config.block_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--seq-len is %lld, allowed: 1 to the model's block-size of %d",
                         (long long)options->seq_len, config.block_size);
    if (options->min_lr > options->lr)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--min-lr is %g, allowed: 0 to --lr, which is %g",
                         options->min_lr, options->lr);
    if (options->compress == TAGC_POLICY_NAMES && !options->compress_names)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--compress names needs --compress-names PATTERNS");
    if (options->compress != TAGC_POLICY_NAMES && options->compress_names)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--compress-names is given; it needs --compress names");
    TAGC_TRY(check_exchange(options));
    if (options->fork && (options->resume || options->init_from))
        return tagc_fail(TAGC_ERR_ARGUMENT, "--fork and %s both say where to begin: give one of them",
                         options->resume ? "--resume" : "--init-from");
    uint64_t first, last;
    return options->trace_steps ? tagc_train_trace_steps(options->trace_steps, &first, &last) : TAGC_OK;
}
