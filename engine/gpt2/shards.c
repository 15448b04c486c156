/* See shards.h. An index is as hostile as any file: it names only files beside itself. */
#include "gpt2/shards.h"

#include "core/status.h"
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FILES = 4096 };

typedef struct place {
    int file, entry;
} place;

struct tagc_shards {
    tagc_safetensors **files; /* (n_files) */
    char **names;             /* (n_files) as in the index */
    place *places;            /* (n_entries) */
    int n_files, n_entries;
};

static const char weights_name[] = "model.safetensors", index_name[] = "model.safetensors.index.json";

static int ends_with(const char *text, const char *end) {
    size_t n_text = strlen(text), n_end = strlen(end);
    return n_text >= n_end && strcmp(text + n_text - n_end, end) == 0;
}

static tagc_status no_memory(const char *path) {
    return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
}

/* ---- one file ---- */

static tagc_status open_one(const char *path, tagc_shards *shards) {
    shards->files = calloc(1, sizeof *shards->files);
    if (!shards->files) return no_memory(path);
    TAGC_TRY(tagc_safetensors_open(path, &shards->files[0]));
    shards->n_files = 1;
    int n = tagc_safetensors_n_entries(shards->files[0]);
    shards->places = calloc((size_t)n + 1, sizeof *shards->places);
    if (!shards->places) return no_memory(path);
    for (int i = 0; i < n; i++) shards->places[i] = (place){0, i};
    shards->n_entries = n;
    return TAGC_OK;
}

/* ---- an index ---- */

/* The file of that name, which is opened if it is the first tensor in it. */
static tagc_status find_file(const char *path, const char *name, tagc_shards *shards, int *file) {
    char beside[TAGC_PATH_BYTES];
    for (*file = 0; *file < shards->n_files; ++*file)
        if (strcmp(shards->names[*file], name) == 0) return TAGC_OK;
    if (!*name || strchr(name, '/') || name[0] == '.')
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: the file \"%.100s\" must be one beside the index", path,
                         name);
    if (shards->n_files == MOST_FILES)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: names more than %d files", path, MOST_FILES);
    TAGC_TRY(tagc_path_beside(path, name, beside));
    if (!tagc_path_exists(beside))
        return tagc_fail(TAGC_ERR_IO, "%s: names the file %.100s, which is not beside it", path, name);
    shards->names[*file] = strdup(name);
    if (!shards->names[*file]) return no_memory(path);
    tagc_status status = tagc_safetensors_open(beside, &shards->files[*file]);
    if (status != TAGC_OK) free(shards->names[*file]);
    shards->n_files += status == TAGC_OK;
    return status;
}

static tagc_status read_map(const char *path, const json_t *map, tagc_shards *shards) {
    const char *name;
    json_t *value;
    size_t n = json_object_size(map);
    shards->files = calloc(MOST_FILES, sizeof *shards->files);
    shards->names = calloc(MOST_FILES, sizeof *shards->names);
    shards->places = calloc(n + 1, sizeof *shards->places);
    if (!shards->files || !shards->names || !shards->places) return no_memory(path);
    json_object_foreach((json_t *)map, name, value) {
        const char *file_name = json_string_value(value);
        place *at = &shards->places[shards->n_entries];
        if (!file_name)
            return tagc_fail(TAGC_ERR_CORRUPT, "%s: tensor \"%.80s\": the name of its file must be a string",
                             path, name);
        TAGC_TRY(find_file(path, file_name, shards, &at->file));
        at->entry = tagc_safetensors_find(shards->files[at->file], name);
        if (at->entry < 0)
            return tagc_fail(TAGC_ERR_CORRUPT,
                             "%s: tensor \"%.80s\" is not in %.100s, where the index says it is", path, name,
                             file_name);
        shards->n_entries++;
    }
    return TAGC_OK;
}

static tagc_status open_index(const char *path, tagc_shards *shards) {
    json_error_t error;
    FILE *stream = fopen(path, "rbe");
    if (!stream) return tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno));
    json_t *index = json_loadf(stream, JSON_REJECT_DUPLICATES, &error);
    fclose(stream);
    if (!index) return tagc_fail(TAGC_ERR_CORRUPT, "%s: line %d: %.160s", path, error.line, error.text);
    const json_t *map = json_object_get(index, "weight_map");
    tagc_status status =
        json_is_object(map)
            ? read_map(path, map, shards)
            : tagc_fail(TAGC_ERR_CORRUPT, "%s: no index of weights: it has no object \"weight_map\"", path);
    json_decref(index);
    return status;
}

tagc_status tagc_shards_open(const char *path, tagc_shards **out) {
    *out = NULL;
    tagc_shards *shards = calloc(1, sizeof *shards);
    if (!shards) return no_memory(path);
    tagc_status status = ends_with(path, ".json") ? open_index(path, shards) : open_one(path, shards);
    if (status == TAGC_OK)
        *out = shards;
    else
        tagc_shards_close(shards);
    return status;
}

void tagc_shards_close(tagc_shards *shards) {
    if (!shards) return;
    for (int i = 0; i < shards->n_files; i++) {
        tagc_safetensors_close(shards->files[i]);
        if (shards->names) free(shards->names[i]);
    }
    free(shards->files);
    free(shards->names);
    free(shards->places);
    free(shards);
}

int tagc_shards_n_files(const tagc_shards *shards) {
    return shards->n_files;
}

int tagc_shards_n_entries(const tagc_shards *shards) {
    return shards->n_entries;
}

void tagc_shards_entry_at(const tagc_shards *shards, int entry, tagc_safetensors_entry *out) {
    place at = shards->places[entry];
    tagc_safetensors_entry_at(shards->files[at.file], at.entry, out);
}

tagc_status tagc_shards_read(tagc_shards *shards, int entry, uint64_t first, uint64_t n, float *out) {
    place at = shards->places[entry];
    return tagc_safetensors_read(shards->files[at.file], at.entry, first, n, out);
}

/* ---- a folder ---- */

/* What people have in place of safetensors. */
static tagc_status refuse_folder(const char *from) {
    static const struct {
        const char *ending, *what;
    } others[] = {{".bin", "weights of PyTorch"},    {".pt", "weights of PyTorch"},
                  {".pth", "weights of PyTorch"},    {".ckpt", "weights of PyTorch"},
                  {".gguf", "weights of llama.cpp"}, {".h5", "weights of Keras"},
                  {".msgpack", "weights of Flax"},   {".safetensors", "safetensors of another name"}};
    char found[128] = "";
    const char *what = NULL;
    DIR *folder = opendir(from);
    for (struct dirent *entry; folder && !what && (entry = readdir(folder));)
        for (size_t i = 0; i < sizeof others / sizeof others[0] && !what; i++) {
            if (!ends_with(entry->d_name, others[i].ending)) continue;
            what = others[i].what;
            snprintf(found, sizeof found, "%.100s", entry->d_name);
        }
    if (folder) closedir(folder);
    if (what && ends_with(found, ".safetensors"))
        return tagc_fail(TAGC_ERR_IO, "%s has no %s and no index: name the file, %s", from, weights_name,
                         found);
    if (what)
        return tagc_fail(TAGC_ERR_IO,
                         "%s holds %s (%s), and tagc reads safetensors: in Python, "
                         "GPT2LMHeadModel.from_pretrained(FOLDER).save_pretrained(NEW) writes them",
                         from, what, found);
    return tagc_fail(TAGC_ERR_IO, "%s holds neither a checkpoint nor %s", from, weights_name);
}

tagc_status tagc_weights_find(const char *from, char path[TAGC_PATH_BYTES]) {
    if (!tagc_path_is_dir(from)) {
        if (strlen(from) >= TAGC_PATH_BYTES)
            return tagc_fail(TAGC_ERR_IO, "%.200s...: the path is too long", from);
        memcpy(path, from, strlen(from) + 1);
        return TAGC_OK;
    }
    TAGC_TRY(tagc_path_join(from, weights_name, path));
    if (tagc_path_exists(path)) return TAGC_OK;
    TAGC_TRY(tagc_path_join(from, index_name, path));
    return tagc_path_exists(path) ? TAGC_OK : refuse_folder(from);
}
