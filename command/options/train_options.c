/* The table of `tagc train`. */
#include "options/train_options.h"

#include "disk/paths.h"
#include "exchange/options.h"
#include "gpt2/shards.h"
#include <math.h>

static int is_direct(const tagc_train_options *o) {
    return tagc_train_compresses(o) && o->exchange == TAGC_EXCHANGE_DIRECT;
}

int tagc_train_is_coded(const tagc_train_facts *facts) {
    return is_direct(facts->options) || facts->has_mild;
}

#define HERE " and has no effect here"
/* A function of the name that returns what is missing unless `met`. f: facts, o: options. */
#define LACKS(name, met, what)                                                                               \
    static const char *name(const void *facts) {                                                             \
        const tagc_train_facts *f = facts;                                                                   \
        const tagc_train_options *o = f->options;                                                            \
        return (void)o, (met) ? NULL : (what);                                                               \
    }

LACKS(lacks_exchange, o->exchange == TAGC_TRAIN_DENSE || f->has_mild || o->compress != TAGC_POLICY_NONE,
      "--compress other than none" HERE)
LACKS(lacks_compression, tagc_train_compresses(o),
      o->compress == TAGC_POLICY_NONE ? "compressed gradients and has no effect with --compress none"
                                      : "compressed gradients and has no effect with --exchange dense")
/* Also what is compressed by name alone has its first moment. */
LACKS(lacks_policy, o->compress != TAGC_POLICY_NONE, lacks_compression(f))
LACKS(lacks_sketch, o->exchange == TAGC_EXCHANGE_SKETCH && tagc_train_compresses(o),
      o->exchange == TAGC_EXCHANGE_SKETCH ? lacks_compression(f) : "--exchange sketch" HERE)
LACKS(lacks_index,
      tagc_train_compresses(o) &&
          (o->exchange == TAGC_EXCHANGE_SKETCH || o->exchange == TAGC_EXCHANGE_PACKED),
      tagc_train_compresses(o) ? "--exchange sketch and packed" HERE : lacks_compression(f))
LACKS(lacks_direct, is_direct(o), "--exchange direct" HERE)
LACKS(lacks_results, is_direct(o) && (o->sharding == TAGC_SHARD_NONE || o->sharding == TAGC_SHARD_HYBRID),
      is_direct(o) ? "--sharding none and hybrid" HERE : "--exchange direct" HERE)
LACKS(lacks_coded, tagc_train_is_coded(f), "--exchange direct and --mild" HERE)
LACKS(lacks_matrices, f->has_mild || o->mild == 0, "matrices that --compress leaves out" HERE)
LACKS(lacks_mild, f->has_mild, "--mild" HERE)
LACKS(lacks_levels,
      o->ranks_per_host > 1 &&
          (tagc_train_is_coded(f) || o->sharding == TAGC_SHARD_FULL || o->sharding == TAGC_SHARD_GRAD),
      o->ranks_per_host > 1 ? "direct exchanges and sharded parameters" HERE
                            : "--ranks-per-host of 2 or more" HERE)
LACKS(lacks_hosts, o->sharding == TAGC_SHARD_HYBRID || o->two_level, "--sharding hybrid and --two-level" HERE)
LACKS(lacks_sharding, o->sharding != TAGC_SHARD_NONE, "sharded parameters" HERE)
LACKS(lacks_deltas, o->gather >= TAGC_GATHER_DELTA8, "--gather delta8, delta4 and delta2" HERE)
LACKS(lacks_wsd, o->schedule == TAGC_RATE_WSD, "--schedule wsd" HERE)
LACKS(lacks_fork, o->schedule_from == 0 || o->fork || o->resume, "--fork" HERE)
LACKS(lacks_trace, o->trace != NULL, "--trace" HERE)
LACKS(lacks_out, o->out != NULL, "--out" HERE)

/* ---- rows ---- */

#define AT(field) offsetof(tagc_train_options, field)
#define INT(section_, name_, role_, field, min_, max_, word, initial_, help_)                                \
    .section = section_, .name = name_, .type = TAGC_OPTION_INT, .role = role_, .offset = AT(field),         \
    .min = min_, .max = max_, .words = word, .initial = initial_, .value = "N", .help = help_
#define REAL(section_, name_, role_, field, min_, max_, word, initial_, help_)                               \
    .section = section_, .name = name_, .type = TAGC_OPTION_REAL, .role = role_, .offset = AT(field),        \
    .min = min_, .max = max_, .words = word, .initial = initial_, .value = "X", .help = help_
#define TEXT(section_, name_, role_, field, bare, initial_, value_, help_)                                   \
    .section = section_, .name = name_, .type = TAGC_OPTION_TEXT, .role = role_, .offset = AT(field),        \
    .words = bare, .initial = initial_, .value = value_, .help = help_
#define FLAG(section_, name_, role_, field, initial_, help_)                                                 \
    .section = section_, .name = name_, .type = TAGC_OPTION_FLAG, .role = role_, .offset = AT(field),        \
    .initial = initial_, .help = help_
#define CHOICE(section_, name_, role_, field, words_, initial_, help_)                                       \
    .section = section_, .name = name_, .type = TAGC_OPTION_CHOICE, .role = role_, .offset = AT(field),      \
    .words = words_, .initial = initial_, .help = help_
#define FREE TAGC_ROLE_FREE
#define FIXED TAGC_ROLE_FIXED
#define PLACE TAGC_ROLE_PLACE
#define RUN TAGC_ROLE_RUN
#define LOCAL TAGC_ROLE_LOCAL

/* clang-format off */
static const tagc_option rows[] = {
    {TEXT("Data", "data", PLACE, data, NULL, NULL, "DIR|FILE",
         "tokens to train on: a folder with train.bin and val.bin (made by tagc data, nanoGPT or llm.c), or with shards *.bin that have train"
         " or val in their names; one file; or a pattern of shards in quotes, as 'fineweb/*train*.bin'")},
    {TEXT(NULL, "val-data", PLACE, val_data, NULL, NULL, "FILE", "tokens for the validation loss, where they are not in DIR: a file or a pattern")},

    {TEXT("Model", "model", FIXED, model, NULL, "demo", "PRESET",
         "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-162m (the paper's, untied), demo or tiny; gpt2-124m is gpt2; the"
         " options below change single numbers of it")},
    {INT(NULL, "n-layer", FIXED, n_layer, 1, 1000, "preset", "preset", "transformer blocks")},
    {INT(NULL, "n-head", FIXED, n_head, 1, 65536, "preset", "preset", "attention heads; divides --n-embd")},
    {INT(NULL, "n-embd", FIXED, n_embd, 1, 65536, "preset", "preset", "width of the model")},
    {INT(NULL, "block-size", FIXED, block_size, 1, 1048576, "preset", "preset", "most positions in a sequence")},
    {INT(NULL, "vocab-size", FIXED, vocab_size, 1, 16777216, "preset", "preset", "tokens the model knows")},
    {CHOICE(NULL, "tied", FIXED, tied, "preset|yes|no", "preset", "whether the head shares the token embedding")},
    {TEXT(NULL, "init-from", PLACE, init_from, NULL, NULL, "FILE|DIR",
         "start from these weights (safetensors, Hugging Face's GPT-2 names, in one file or in several with an index) instead of"
         " random ones; the model is that of the"
         " config.json beside them, where there is one and --model is not given")},

    {INT("Steps", "steps", FREE, steps, 0, 1000000000, NULL, "1000", "optimizer steps, from the very start of the run")},
    {INT(NULL, "batch-size", FREE, batch_size, 1, 65536, NULL, "8",
        "sequences per rank and micro-step; a step sees batch-size x ranks x accumulate of them")},
    {INT(NULL, "seq-len", FREE, seq_len, 1, 1048576, "block-size", "block-size", "tokens per sequence")},
    {INT(NULL, "accumulate", FREE, accumulate, 1, 65536, NULL, "1", "micro-steps per optimizer step")},
    {INT(NULL, "seed", FIXED, seed, 0, 4294967295.0, NULL, "0", "seed of the initial weights and of the order of the data")},

    {REAL("Optimizer (AdamW)", "lr", FREE, lr, 0, 10, NULL, "6e-4", "highest learning rate")},
    {REAL(NULL, "min-lr", FREE, min_lr, 0, 10, "auto=-1", "auto",
         "learning rate at the last step; auto: 6e-5, or --lr where that is less")},
    {INT(NULL, "warmup", FREE, warmup, 0, 1000000000, NULL, "100", "steps in which the learning rate rises to --lr")},
    {CHOICE(NULL, "schedule", FREE, schedule, "cosine|wsd", "cosine",
           "learning rate after the warm-up: half a cosine from --lr to --min-lr; or --lr, and in the last --decay-steps a straight line to"
           " --min-lr (warm-up, stable, decay)")},
    {INT(NULL, "decay-steps", FREE, decay_steps, 0, 1000000000, "tenth", "tenth",
        "last steps, in which the learning rate falls; tenth: a tenth of --steps"), .lacks = lacks_wsd},
    {CHOICE(NULL, "schedule-from", FREE, schedule_from, "start|fork", "start",
           "where the warm-up and the schedule begin: at step 0, so that a fork with the options of its origin goes on along the same"
           " curve, or at the fork; either ends at --steps. A constant rate: --min-lr equal to --lr"), .lacks = lacks_fork},
    {REAL(NULL, "weight-decay", FREE, weight_decay, 0, 10, NULL, "0.1", "weight decay of matrices; norms and biases have none")},
    {REAL(NULL, "beta1", FREE, beta1, 0, 0.999999, NULL, "0.9", "decay of the first moment")},
    {REAL(NULL, "compressed-beta1", FREE, compressed_beta1, 0, 0.999999, "auto=-1", "auto",
         "decay of the first moment of compressed tensors; auto: 0.5 or a smaller --beta1 for direct above --sparsity 0, whose"
         " residual averages already, else --beta1. With --gentle, --beta1 falls to it step by step"), .lacks = lacks_policy},
    {REAL(NULL, "beta2", FREE, beta2, 0, 0.999999, NULL, "0.95", "decay of the second moment")},
    {REAL(NULL, "compressed-beta2", FREE, compressed_beta2, 0, 0.9999999, "auto=-1", "auto",
         "decay of the second moment of compressed tensors, and of mild ones above --mild-sparsity 0, reached step by step once"
         " values are selected; auto: for direct above --sparsity 0 its distance from 1 becomes a tenth of --beta2's, because values"
         " come seldom, else --beta2"), .lacks = lacks_policy},
    {REAL(NULL, "clip", FREE, clip, 0, 1e9, NULL, "1", "largest norm of the gradient; 0 does not clip")},

    {TEXT("Sharding", "preset", PLACE, preset, NULL, NULL, "ARM",
         "options of an arm of tagc bench, as fsdp, bf16 or all-legs; options on the command line take precedence. Default: all-legs"
         " for a new run on several ranks; none if --sharding, --gather, --wire, --compress or --exchange is given")},
    {TEXT(NULL, "levels", PLACE, levels, NULL, NULL, "LEVELS",
         "how ranks are grouped: hosts=H,ranks=R sets --two-level; replaces --ranks and --ranks-per-host")},
    {CHOICE(NULL, "sharding", FIXED, sharding, "full/zero3|grad/zero2|none/ddp|hybrid/hsdp", "full",
           "full: parameters, gradients and optimizer in parts (ZeRO-3); grad: gradients and optimizer (ZeRO-2);"
           " none: everything on every rank (DDP); hybrid: full inside each host, replicas across hosts")},
    {CHOICE(NULL, "wrap", FIXED, wrap, "block|matrix", "block",
           "what is gathered together: a block, or as in the paper each matrix above 2 M elements alone")},
    {INT(NULL, "bucket-elems", FREE, bucket_elems, 0, 1099511627776.0, NULL, "0",
        "neighbouring blocks of less than N values share one unit, until it has N: fewer messages over far links")},
    {CHOICE(NULL, "gather", FREE, gather, "fp32|bf16|lossless|int8|delta8|delta4|delta2", "fp32",
           "how parameters travel; lossless: bf16 in about 11 bits; deltas (with --sharding grad) send what changed since the last step in 8, 4 or 2 bits"), .lacks = lacks_sharding},
    {INT(NULL, "gather-check-every", FREE, gather_check_every, 0, 2147483647, "never", "never",
        "gathers between comparisons of the ranks' replicas by checksum; for deltas"), .lacks = lacks_deltas},
    {INT(NULL, "ranks-per-host", FIXED, ranks_per_host, 1, TAGC_TRAIN_MAX_RANKS, NULL, "1",
        "neighbouring ranks that share a host, for --sharding hybrid and --two-level"), .lacks = lacks_hosts},
    {FLAG(NULL, "two-level", FREE, two_level, "no",
         "parameters cross to each host once; direct: gradients of a host's ranks are added first and compressed only"
         " between hosts"), .lacks = lacks_levels},
    {INT(NULL, "prefetch", FREE, prefetch, 0, 64, NULL, "1", "units gathered ahead of their use")},
    {INT(NULL, "grads-in-flight", FREE, grads_in_flight, 1, 8, NULL, "2",
        "units whose whole gradients are in memory at once, being computed or exchanged: so many exchanges share their latency;"
        " with accumulation it is all units")},
    {FLAG(NULL, "exchange-each-micro-step", FREE, exchange_each_micro_step, "no",
         "send gradients at every micro-step, as the paper's loop does, not only at the last")},

    {CHOICE("Compression of gradients", "compress", FIXED, compress, "none|non-attention-linear|paper|all|names",
           "non-attention-linear",
           "which tensors: feed-forward, embedding, head and the projection after attention; every matrix above 2 M"
           " elements; everything; or what --compress-names matches. The rest: --mild")},
    {TEXT(NULL, "compress-names", FIXED, compress_names, NULL, NULL, "PATTERNS",
         "shell patterns of tensor names with commas between, as in \"h.*.mlp.*,wte.*\"")},
    {CHOICE(NULL, "exchange", FIXED, exchange, "dense|sketch|packed|direct", "direct",
           "dense: every value, as --wire says; sketch: TAGC as published, index and count sketch; packed: index and the values behind"
           " it, nothing to peel; direct: each rank's own positions and low-bit values, straight to the owner"), .lacks = lacks_exchange},
    {CHOICE(NULL, "values", FREE, values, "fp32|bf16|int8|int4|int2|auto", "auto",
           "direct: how a value travels; what rounding loses stays in the residual; auto: the best measured, which the"
           " run prints as it begins"), .lacks = lacks_direct},
    {CHOICE(NULL, "residual", FREE, residual, "fp32|int8|int4", "int8",
           "direct: how the residual is stored between steps, in 4, 1 or 0.5 bytes per value"), .lacks = lacks_direct},
    {INT(NULL, "block", FREE, block, 16, 4096, NULL, "128", "direct: values that share a scale; a power of two"), .lacks = lacks_coded},
    {CHOICE(NULL, "mild", FIXED, mild, "dense|bf16|int8|int4|int2|auto", "auto",
           "how the matrices travel that --compress leaves out (attention, positions): dense, or direct with these values;"
           " auto: dense for dense, sketch and packed, else low-bit values as they measured best"), .lacks = lacks_matrices},
    {REAL(NULL, "mild-sparsity", FREE, mild_sparsity, 0, 1, "auto=-1", "auto",
         "sparsity of the matrices that --mild is about; 0 sends every element; auto: 0.85, or --sparsity where that is less"), .lacks = lacks_mild},
    {REAL(NULL, "sparsity", FREE, sparsity, 0, 1, "auto=-1", "auto",
         "least share of a gradient that stays behind as residual; auto: 0.95 for direct, 0.9875 for sketch and packed;"
         " sketch at ratio 2, 4, 10 is made for 0.8, 0.9, 0.9875"), .lacks = lacks_compression},
    {REAL(NULL, "result-sparsity", FREE, result_sparsity, 0, 1, "auto=-1", "auto",
         "where every rank gets all sums: least share of the sums of compressed matrices that stays with their owner as residual;"
         " auto: owners send back 2.4 times the share that ranks send"), .lacks = lacks_results},
    {CHOICE(NULL, "result-values", FREE, result_values, "auto|fp32|bf16|int8|int4|int2", "auto",
           "how such a sum travels; auto: int4, or --values if that is finer"), .lacks = lacks_results},
    {REAL(NULL, "ratio", FREE, ratio, 1, 1000, "auto", "auto",
         "sketch: values per cell; auto takes as many cells as the index says are needed"), .lacks = lacks_sketch},
    {CHOICE(NULL, "index", FREE, index, "or|sum4|sum1", "or",
           "or: 1 bit per element and a true OR; sum4: LHC's 4 bits, summed; sum1 reproduces a LOSSY published index"), .lacks = lacks_index},
    {CHOICE(NULL, "cells", FREE, cells, "fp32|fixed", "fp32", "sketch: fixed point peels without any rounding"), .lacks = lacks_sketch},
    {CHOICE(NULL, "unpeeled", FREE, unpeeled, "packed|residual|estimate", "packed",
           "sketch: values it cannot give back are sent plainly, stay in the residual, or are estimated (the paper,"
           " LOSSY)"), .lacks = lacks_sketch},
    {CHOICE(NULL, "fill-union", FREE, fill_union, "auto|yes|no", "auto",
           "send also what other ranks selected: costs no bytes; auto: yes for packed"), .lacks = lacks_index},
    {CHOICE(NULL, "wire", FREE, wire, "fp32|bf16", "fp32", "how dense gradients travel; sums are fp32")},

    {CHOICE("Error feedback", "gentle", FREE, gentle, "auto|yes|no", "auto",
           "direct: follow the schedule of tagc/schedule.h: begin with every value, come unit by unit to --sparsity and"
           " --mild-sparsity when gradients are mostly noise, and go back to every value where compression falls behind; auto: where"
           " --sparsity is not given"), .lacks = lacks_direct},

    {INT("Ranks and machine", "ranks", LOCAL, ranks, 1, TAGC_TRAIN_MAX_RANKS, NULL, "1",
        "ranks as threads of this process; under mpirun every process is a rank and this is not needed; resuming, as many as saved")},
    {CHOICE(NULL, "transport", LOCAL, transport, "auto|local|mpi", "auto", "auto: mpi when started by mpirun, else local")},
    {REAL(NULL, "timeout", FREE, timeout, 0.001, 1e6, NULL, "120", "seconds after which a silent peer counts as dead")},
    {INT(NULL, "codec-threads", LOCAL, codec_threads, 1, 256, NULL, "1", "threads that compress, per rank")},
    {INT(NULL, "blas-threads", LOCAL, blas_threads, 1, 256, "auto", "auto",
        "threads of a matrix product, per process; auto: OPENBLAS_NUM_THREADS, else the processors of this host, divided by its ranks. Results may depend on it in"
        " the last bits; a checkpoint records it")},

    {TEXT("The run", "out", RUN, out, NULL, NULL, "DIR",
         "folder for metrics.jsonl and checkpoints; without it the run writes nothing")},
    {INT(NULL, "eval-every", FREE, eval_every, 1, 1000000000, "never", "100", "steps between validation losses")},
    {INT(NULL, "eval-batches", FREE, eval_batches, 1, 1000000, NULL, "20", "batches per rank and validation loss")},
    {INT(NULL, "save-every", FREE, save_every, 1, 1000000000, "end", "end", "steps between checkpoints"), .lacks = lacks_out},
    {INT(NULL, "keep", FREE, keep, 1, 1000000, NULL, "2", "checkpoints that are kept"), .lacks = lacks_out},
    {TEXT(NULL, "resume", RUN, resume, "latest", NULL, "PATH",
         "go on from the newest checkpoint of --out, or from the one at PATH; options not given are the checkpoint's. A run that"
         " saved none yet begins again, with the options that are given")},
    {TEXT(NULL, "fork", RUN, fork, NULL, NULL, "PATH",
         "a new run that begins with the weights, moments and step number of another run's checkpoint; any other option"
         " and the number of ranks may differ, residuals start empty, data from their beginning; the model is the checkpoint's")},
    {TEXT(NULL, "trace", RUN, trace, NULL, NULL, "FILE",
         "timeline of compute, codec and communication of every rank; open it at ui.perfetto.dev")},
    {TEXT(NULL, "trace-steps", RUN, trace_steps, NULL, NULL, "FIRST-LAST",
         "steps in the timeline; without it the third to the fifth from where the run starts or goes on"), .lacks = lacks_trace},
    {FLAG(NULL, "quiet", LOCAL, quiet, "no", "print nothing but failures")},
    {TEXT(NULL, "config", LOCAL, config, NULL, NULL, "FILE",
         "lines of name = value, # before comments; the command line wins")},
};
/* clang-format on */

static const char examples[] =
    "  # A first run: two ranks as threads, small model, gradients compressed.\n"
    "  tagc data --out data/books books/*.txt\n"
    "  tagc train --data data/books --ranks 2 --steps 300 --out runs/first\n"
    "\n"
    "  # The same over MPI, on this host or on several. Open MPI wants --allow-run-as-root as root, and\n"
    "  # --oversubscribe for more ranks than processors.\n"
    "  mpirun -n 2 tagc train --data data/books --steps 300 --out runs/mpi\n"
    "\n"
    "  # The paper's 10x setting, and plain FSDP to compare it with.\n"
    "  tagc train --config lab/configs/tagc-10x-or.conf --data data/books --ranks 2 --out runs/tagc\n"
    "  tagc train --config lab/configs/fsdp.conf --data data/books --ranks 2 --out runs/fsdp\n"
    "  tagc compare runs/fsdp runs/tagc\n"
    "\n"
    "  # Stops a run under mpirun: mpirun forwards SIGUSR1 and waits while the run saves.\n"
    "  kill -USR1 PID-OF-MPIRUN\n"
    "\n"
    "  # Ctrl-C saves and stops. This continues the run with the same options.\n"
    "  tagc train --data data/books --ranks 2 --out runs/first --resume\n";

_Static_assert(sizeof rows / sizeof rows[0] <= TAGC_MAX_OPTIONS, "raise TAGC_MAX_OPTIONS");

static void resolve(void *values);

const tagc_command tagc_train_command = {
    .name = "train",
    .summary = "train a GPT-2 on one or more ranks, gradients compressed or not",
    .usage = "--data DIR [options]",
    .common = "data model steps batch-size lr ranks preset out resume",
    .examples = examples,
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .resolve = resolve};

const char *const tagc_train_shape[TAGC_TRAIN_N_SHAPE] = {"model",      "n-layer",    "n-head", "n-embd",
                                                          "block-size", "vocab-size", "tied"};

const char *tagc_train_word(const tagc_train_options *options, const char *name) {
    static _Thread_local char word[64];
    tagc_options_get(&tagc_train_command, options, tagc_options_find(&tagc_train_command, name), word,
                     sizeof word);
    return word;
}

void tagc_train_set_shape(const tagc_parsed *parsed, const tagc_gpt2_config *config,
                          tagc_train_options *options) {
    int64_t *const values[] = {&options->n_layer, &options->n_head, &options->n_embd, &options->block_size,
                               &options->vocab_size};
    const int shape[] = {config->n_layer, config->n_head, config->n_embd, config->block_size,
                         config->vocab_size};
    for (int i = 0; i < 5; i++)
        if (!tagc_options_given(parsed, tagc_train_shape[i + 1])) *values[i] = shape[i];
    if (!tagc_options_given(parsed, "tied")) options->tied = config->tied ? 1 : 2;
}

tagc_status tagc_train_take_shape(const tagc_parsed *parsed, tagc_train_options *options) {
    char weights[TAGC_PATH_BYTES], path[TAGC_PATH_BYTES];
    tagc_gpt2_config config;
    TAGC_TRY(tagc_weights_find(options->init_from, weights));
    TAGC_TRY(tagc_path_beside(weights, "config.json", path));
    if (!tagc_path_exists(path)) return TAGC_OK;
    TAGC_TRY(tagc_gpt2_config_read(path, &config));
    tagc_train_set_shape(parsed, &config, options);
    return TAGC_OK;
}

static void resolve(void *values) {
    tagc_train_options *options = values;
    tagc_fsdp_options engine;
    tagc_train_fsdp(options, &engine);
    if (options->min_lr < 0) options->min_lr = fmin(6e-5, options->lr);
    options->gentle = engine.gentle ? 1 : 2;
    tagc_schedule_options direct; /* for other exchanges, too: a fork may choose it */
    tagc_schedule_options_init(&direct);
    if (options->values == TAGC_TRAIN_AUTO_VALUES) options->values = direct.format;
    if (options->exchange != TAGC_TRAIN_DENSE) options->sparsity = engine.reducer.sparsity;
    if (options->sparsity == -1) options->sparsity = direct.sparsity;
    options->compressed_beta1 = engine.beta1_compressed;
    options->compressed_beta2 = engine.beta2_compressed;
    options->mild = engine.mild.exchange == TAGC_NO_MILD ? 0 : engine.mild.format;
    options->mild_sparsity = engine.mild.sparsity;
}

/* ---- checks of values against each other; each row of the table checks its own range ---- */

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
