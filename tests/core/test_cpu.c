/* TAGC_CPU makes a process act as on a lesser processor, and nothing but a level of this processor is followed. The level
 * is found once per process, so each case is a child. */
#include "../test.h"
#include "core/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const tagc_cpu all[] = {TAGC_CPU_SCALAR, TAGC_CPU_NEON, TAGC_CPU_AVX2, TAGC_CPU_AVX512};
enum { N_ALL = sizeof all / sizeof *all };

/* The answers of a process with this TAGC_CPU (NULL: unset). */
typedef struct answers {
    tagc_cpu best, processor;
    int has[N_ALL], has_vbmi2;
    tagc_status status;
    char text[512];
} answers;

static answers answers_with(const char *value) {
    answers a;
    int ends[2], code;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        memset(&a, 0, sizeof a);
        if (value)
            setenv("TAGC_CPU", value, 1);
        else
            unsetenv("TAGC_CPU");
        a.best = tagc_cpu_best();
        a.processor = tagc_cpu_of_processor();
        for (int i = 0; i < N_ALL; i++) a.has[i] = tagc_cpu_has(all[i]);
        a.has_vbmi2 = tagc_cpu_has_vbmi2();
        a.status = tagc_cpu_check();
        if (a.status != TAGC_OK) strncpy(a.text, tagc_last_error(), sizeof a.text - 1);
        _exit(write(ends[1], &a, sizeof a) != sizeof a);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &a, sizeof a), sizeof a);
    close(ends[0]);
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
    return a;
}

TEST(best_is_what_the_processor_has) {
    answers a = answers_with(NULL), empty = answers_with("");
    assert_int_equal(a.status, TAGC_OK);
    assert_int_equal(empty.status, TAGC_OK);
    assert_int_equal(a.best, empty.best);
    assert_true(a.has[TAGC_CPU_SCALAR]);
    for (int i = 0; i < N_ALL; i++) assert_true(!a.has[i] || all[i] <= a.best);
    assert_true(a.has[a.best]);
#if defined(__aarch64__)
    assert_int_equal(a.best, TAGC_CPU_NEON);
#elif defined(__x86_64__)
    assert_false(a.has[TAGC_CPU_NEON]);
    assert_int_equal(a.has[TAGC_CPU_AVX512],
                     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"));
    assert_int_equal(a.has[TAGC_CPU_AVX2], !!__builtin_cpu_supports("avx2"));
#endif
}

TEST(a_level_hides_what_is_better) {
    answers free_choice = answers_with(NULL);
    for (int i = 0; i < N_ALL; i++) {
        answers a = answers_with(tagc_cpu_name(all[i]));
        if (!free_choice.has[i]) { /* and then goes on as without */
            assert_int_equal(a.status, TAGC_ERR_UNSUPPORTED);
            assert_non_null(strstr(a.text, tagc_cpu_name(all[i])));
            assert_non_null(strstr(a.text, "scalar"));
            assert_int_equal(a.best, free_choice.best);
            continue;
        }
        assert_int_equal(a.status, TAGC_OK);
        assert_int_equal(a.best, all[i]);
        assert_int_equal(a.processor, free_choice.best);
        for (int j = 0; j < N_ALL; j++) assert_int_equal(a.has[j], free_choice.has[j] && j <= i);
        assert_int_equal(a.has_vbmi2, free_choice.has_vbmi2 && all[i] == TAGC_CPU_AVX512);
    }
}

TEST(other_words_are_refused) {
    const char *words[] = {"sse2", "AVX2", " avx2", "avx", "avx5120", "0"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        answers a = answers_with(words[i]);
        assert_int_equal(a.status, TAGC_ERR_ARGUMENT);
        assert_non_null(strstr(a.text, words[i]));
        assert_non_null(strstr(a.text, "scalar"));
    }
}

/* For scripts: --has LEVEL is 0 where this processor has it; --levels prints which it has and lacks. */
static int answer(int argc, char **argv) {
    int n_found = 0;
    if (strcmp(argv[1], "--levels") == 0)
        for (int has = 1; has >= 0; has--)
            for (int i = 0; i < N_ALL; i++) {
                if (tagc_cpu_has(all[i]) != has) continue;
                n_found += !has;
                printf("%s%s",
                       has            ? i ? " " : ""
                       : n_found == 1 ? "; not here: "
                                      : " ",
                       tagc_cpu_name(all[i]));
            }
    for (int i = 0; argc > 2 && i < N_ALL; i++)
        if (strcmp(argv[2], tagc_cpu_name(all[i])) == 0 && tagc_cpu_has(all[i])) return 0;
    if (argc > 2) printf("this processor has no %s", argv[2]);
    printf("\n");
    return argc > 2;
}

int main(int argc, char **argv) {
    if (argc > 1) return answer(argc, argv);
    return test_run(NULL, NULL);
}
