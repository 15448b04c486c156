/* Describes the build and the system. What is unknown becomes null, so that a result never fails for it. */
#include "files/result_file.h"

#include "blas/blas.h"
#include "tagc/tagc.h"
#include "tagc_commit.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

/* Words of a command line may not be UTF-8, which json_string refuses. Such bytes become '?'. */
static json_t *any_text(const char *text) {
    json_t *json = json_string(text);
    if (json) return json;
    char *copy = strdup(text);
    for (char *c = copy; c && *c; c++)
        if ((unsigned char)*c >= 0x80) *c = '?';
    json = copy ? json_string(copy) : NULL;
    free(copy);
    return json;
}

void tagc_origin_host(char *name, int n_bytes) {
    if (gethostname(name, (size_t)n_bytes - 1) != 0 || !*name) snprintf(name, (size_t)n_bytes, "localhost");
    name[n_bytes - 1] = '\0';
}

/* The name in /proc/cpuinfo, else the architecture. */
static json_t *cpu(const struct utsname *system) {
    char line[512];
    json_t *found = NULL;
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = '\0';
        found = any_text(colon + 1 + strspn(colon + 1, " \t"));
    }
    if (file) fclose(file);
    return found ? found : any_text(system->machine);
}

json_t *tagc_origin_blas(void) {
    tagc_blas_about blas;
    tagc_blas_describe(&blas);
    return json_pack("{s:o, s:o, s:i}", "name", any_text(blas.name), "kernel", any_text(blas.kernel),
                     "n_threads", blas.n_threads);
}

static json_t *machine(json_t *hosts) {
    char text[160];
    struct utsname system = {0};
    if (uname(&system) != 0) snprintf(system.sysname, sizeof system.sysname, "unknown");
    if (!hosts) {
        tagc_origin_host(text, sizeof text);
        hosts = json_pack("[o]", any_text(text));
    }
    snprintf(text, sizeof text, "%.64s %.64s", system.sysname, system.release);
    json_int_t n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    json_int_t n_bytes = (json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    return json_pack("{s:o, s:I, s:I, s:o, s:o, s:o}", "cpu", cpu(&system), "n_cpus", n_cpus, "memory_bytes",
                     n_bytes, "os", any_text(text), "hosts", hosts, "blas", tagc_origin_blas());
}

const char *tagc_origin_commit(void) {
    return TAGC_COMMIT;
}

json_t *tagc_origin(const char *command, int argc, char *const *argv, json_t *hosts) {
    char date[32];
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    json_t *words = json_pack("[s, s]", "tagc", command);
    for (int i = 0; i < argc; i++) json_array_append_new(words, any_text(argv[i]));
    return json_pack("{s:s, s:s?, s:s, s:o, s:o}", "version", tagc_version(), "commit", tagc_origin_commit(),
                     "date", date, "command", words, "machine", machine(hosts));
}
