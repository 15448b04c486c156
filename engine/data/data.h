/* From text to batches: token files, the corpus builder, and the loader for training.
 *
 *   text files --tagc_data_build--> train.bin, val.bin --tagc_data_open--> tokens --tagc_loader--> (B, T)
 *
 * The builder makes a token of each byte. Files of other tokens come from `python -m tagc data`, nanoGPT or llm.c.
 *
 * This module knows neither models nor networks. A rank only selects which windows of a batch to read. */
#ifndef TAGC_DATA_DATA_H
#define TAGC_DATA_DATA_H

#include "tagc/tagc.h"

/* ---- token files: one long array of tokens, memory-mapped, from one file or from several, its shards ---- */

typedef struct tagc_tokens tagc_tokens;

/* Known by the magic number; a file without one is RAW16 if its name ends in ".bin". */
typedef enum tagc_tokens_format {
    TAGC_TOKENS_TAGC,  /* this project's: see engine/data/token_file.h */
    TAGC_TOKENS_RAW16, /* nanoGPT: uint16 and nothing else */
    TAGC_TOKENS_LLMC   /* llm.c: 256 int32 of header, then uint16 (GPT-2) or uint32 (Llama 3) */
} tagc_tokens_format;

#define TAGC_TOKENIZER_NAME_BYTES 64

typedef struct tagc_tokens_info {
    int format;          /* tagc_tokens_format */
    int token_bytes;     /* 1, 2 or 4 */
    uint64_t n_tokens;   /* >= 1 */
    uint32_t vocab_size; /* every token is below; 0 if the format does not record it (RAW16) */
    int64_t end_of_text; /* the token between documents, -1 if the format does not record it */
    uint64_t first_byte; /* of the payload in the file */
    /* Equal names mean equal tokens: "bytes", or "tokenizers-" and a checksum of tokenizer.json. "": not known. */
    char tokenizer[TAGC_TOKENIZER_NAME_BYTES];
} tagc_tokens_info;

const char *tagc_tokens_format_name(int format); /* "tagc", "raw16", "llmc"; "?" for others */

void tagc_tokens_close(tagc_tokens *tokens); /* accepts NULL */
void tagc_tokens_get_info(const tagc_tokens *tokens, tagc_tokens_info *out);
const char *tagc_tokens_path(const tagc_tokens *tokens); /* a file, or the folder or pattern of the shards */
size_t tagc_tokens_n_shards(const tagc_tokens *tokens);
uint64_t tagc_tokens_n(const tagc_tokens *tokens);

/* A hash of the number of tokens and of 1,024 pieces of the file at even distances (of all of it where it is small): equal files have equal ones, and a
 * file of other text has another one. Of shards: a hash of theirs, in order. */
uint64_t tagc_tokens_fingerprint(const tagc_tokens *tokens);

/* out (n) = tokens [first, first + n). A token that is not below vocab_size (1 to 2^31 - 1) is
 * TAGC_ERR_CORRUPT with the file and the byte offset. */
tagc_status tagc_tokens_read(const tagc_tokens *tokens, uint64_t first, size_t n, uint32_t vocab_size,
                             int *out);

/* ---- finding token files ---- */

typedef enum tagc_data_part { TAGC_DATA_TRAIN = 0, TAGC_DATA_VAL = 1 } tagc_data_part;

/* Finds that part of `data`, maps its files and checks their headers against their sizes; in our own format also their checksums, which
 * reads all of them once. Failures name the file, the field, its value and what is allowed.
 *
 *   a file                        the file
 *   a pattern, as "corpus/t*.bin" all files that match, in byte order of their paths
 *   a folder                      its train.bin or val.bin. If there is none, its shards in byte order of their names: files *.bin
 *                                 with "train" or "val" in their names; if none has "train", TRAIN is all without "val"
 * TAGC_ERR_IO where there is none. */
tagc_status tagc_data_open(const char *data, tagc_data_part part, tagc_tokens **out);
int tagc_data_has(const char *data, tagc_data_part part);

/* ---- corpus: files and folders of text into train.bin and val.bin ---- */

/* A token is a byte, and the byte 0 ends a text. So the vocabulary is 256, a token takes one byte in the file, and no row
 * of the model exists for a single token. A text must not contain the byte 0. If one does, it is usually not a text file,
 * and the corpus builder says so. */
#define TAGC_BYTES_TOKENIZER "bytes"
enum { TAGC_BYTES_VOCAB_SIZE = 256, TAGC_BYTES_END_OF_TEXT = 0 };

/* Why a name was passed over. All but TWICE are of names below a folder; what the caller names is read, or a failure. */
typedef enum tagc_data_skip {
    TAGC_SKIP_HIDDEN,  /* its name begins with a dot */
    TAGC_SKIP_BROKEN,  /* a link to nothing, or to itself */
    TAGC_SKIP_FOLDER,  /* a link to a folder */
    TAGC_SKIP_SPECIAL, /* a pipe, a socket or a device */
    TAGC_SKIP_UNREADABLE,
    TAGC_SKIP_TWICE, /* a file that was reached before, by whatever name */
    TAGC_N_SKIPS
} tagc_data_skip;

enum { TAGC_SKIP_N_NAMED = 3, TAGC_SKIP_PATH_BYTES = 120 };

typedef struct tagc_data_skipped {
    uint64_t n;
    char names[TAGC_SKIP_N_NAMED * (TAGC_SKIP_PATH_BYTES + 2) +
               6]; /* the first of them, and "..." where there are more */
} tagc_data_skipped;

const char *tagc_data_skip_text(int skip); /* "links to nothing" */

typedef struct tagc_data_report {
    uint64_t n_files;         /* read so far */
    uint64_t n_empty;         /* of them without text, which are left out */
    uint64_t n_total_files;   /* found */
    uint64_t n_text_bytes;    /* after decompression */
    uint64_t n_invalid_bytes; /* not UTF-8, or 0; above 0 only with lossy */
    uint64_t n_train_tokens;
    uint64_t n_val_tokens;
    const char *file;                        /* being read; NULL at the end */
    tagc_data_skipped skipped[TAGC_N_SKIPS]; /* by tagc_data_skip */
} tagc_data_report;

typedef struct tagc_data_options {
    const char *const *inputs; /* (n_inputs) files and folders; no default */
    size_t n_inputs;
    const char *out_dir; /* receives train.bin and val.bin; created if missing. No default */
    double val_share;    /* [0, 0.5], default 0.1; 0 writes no val.bin */
    int lossy; /* 0 (default): bytes that are 0 or not UTF-8 are an error; 1: they are kept as they are */
    /* Default NULL. If it returns non-zero, the build stops. */
    int (*progress)(void *context, const tagc_data_report *so_far);
    void *progress_context;
} tagc_data_options;

void tagc_data_options_init(tagc_data_options *options);

/* Reads the inputs in the given order, folders recursively in byte order of names, each file once. A file that starts like gzip is
 * decompressed, and a byte order mark of UTF-8 is left out. Each file becomes one document, followed by the byte 0. Without lossy,
 * a file that is of a known kind other than text (UTF-16, zstd, Parquet, JSON lines and so on) is TAGC_ERR_UNSUPPORTED with what to do
 * about it.
 *
 * Validation: with at least 2 / val_share files, a whole document goes there whenever it has less than its share. Else the
 * tail of each document. The same inputs give the same files, byte for byte.
 *
 * Both files appear only when both are complete and on disk. After a failure, older files are as they were. report may be
 * NULL. */
tagc_status tagc_data_build(const tagc_data_options *options, tagc_data_report *report);

/* ---- loader ---- */

/* Cuts the tokens into windows of T + 1 (the last is only a target) at a stride of T and returns them in batches. Window
 * number g of a run is row g mod (B * W) of its global batch, for any B and W: one rank with B = 4 sees what two ranks with
 * B = 2 see. Batches continue into the next epoch; an epoch leaves out no window. */
typedef struct tagc_loader tagc_loader;

typedef struct tagc_loader_options {
    int n_batch;         /* B, sequences of this rank per batch, [1, 65536]. No default */
    int n_tokens;        /* T, [1, 1048576]. No default */
    int rank;            /* [0, world_size), default 0 */
    int world_size;      /* [1, 65536], default 1 */
    uint32_t vocab_size; /* tokens must be below, [1, 2^31 - 1]. No default */
    /* 1 (default): each epoch in an order and from an offset below T drawn from (seed, epoch); 0: in the order of the file
     * from its first token, for evaluation. */
    int shuffle;
    uint64_t seed; /* default 0 */
} tagc_loader_options;

void tagc_loader_options_init(tagc_loader_options *options);

/* The tokens stay the caller's and must outlive the loader. TAGC_ERR_ARGUMENT when they are fewer than T + 1.
 */
tagc_status tagc_loader_create(const tagc_tokens *tokens, const tagc_loader_options *options,
                               tagc_loader **out);
void tagc_loader_destroy(tagc_loader *loader); /* accepts NULL */

/* tokens (B, T), targets (B, T): the tokens that follow. Moves the position by B * W, unless it fails. */
tagc_status tagc_loader_next(tagc_loader *loader, int *tokens, int *targets);

/* Windows of one epoch, over all ranks. */
uint64_t tagc_loader_n_windows(const tagc_loader *loader);

/* Windows returned since the start, over all ranks: all that a checkpoint needs, also to continue with another B or W. Seek
 * accepts [0, 2^62]; seek to 0 before each evaluation. */
uint64_t tagc_loader_position(const tagc_loader *loader);
tagc_status tagc_loader_seek(tagc_loader *loader, uint64_t position);

#endif
