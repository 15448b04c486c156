/* When the program begins again for a better kernel of OpenBLAS. */
#include "../test.h"
#include "blas/blas.h"

#include <stdlib.h>
#include <string.h>

/* What is expected of each case is written by hand: OpenBLAS's own list of processors for each kernel. */
static const struct {
    const char *kernel;
    tagc_cpu cpu;
    const char *asked, *begun;
    tagc_blas_choice choice;
    const char *better;
} cases[] = {
    /* a processor that OpenBLAS does not know */
    {"Prescott", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_AGAIN, "SkylakeX"},
    {"Prescott", TAGC_CPU_AVX2, NULL, NULL, TAGC_BLAS_AGAIN, "Haswell"},
    {"PRESCOTT", TAGC_CPU_AVX2, NULL, NULL, TAGC_BLAS_AGAIN, "Haswell"},
    {"Nehalem", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_AGAIN, "SkylakeX"},
    {"Sandybridge", TAGC_CPU_AVX2, NULL, NULL, TAGC_BLAS_AGAIN, "Haswell"},
    {"Haswell", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_AGAIN, "SkylakeX"},
    {"Prescott", TAGC_CPU_AVX512, "", NULL, TAGC_BLAS_AGAIN,
     "SkylakeX"}, /* empty is unset, to OpenBLAS too */
    /* nothing better: the processor has no more, or the kernel is its own */
    {"Prescott", TAGC_CPU_SCALAR, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Sandybridge", TAGC_CPU_SCALAR, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Haswell", TAGC_CPU_AVX2, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Excavator", TAGC_CPU_AVX2, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Zen", TAGC_CPU_AVX2, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Zen", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"SkylakeX", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Cooperlake", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"SapphireRapids", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"SkylakeX", TAGC_CPU_AVX512, "SkylakeX", "SkylakeX", TAGC_BLAS_RIGHT,
     NULL}, /* begun again, and it helped */
    {"ARMV8", TAGC_CPU_NEON, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"Prescott", TAGC_CPU_NEON, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    {"GraniteRapids", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_RIGHT, NULL}, /* a name of a later OpenBLAS */
    {"", TAGC_CPU_AVX512, NULL, NULL, TAGC_BLAS_RIGHT, NULL},
    /* the user's own choice stays */
    {"Prescott", TAGC_CPU_AVX512, "Prescott", NULL, TAGC_BLAS_USERS_SLOW, "SkylakeX"},
    {"Haswell", TAGC_CPU_AVX512, "haswell", NULL, TAGC_BLAS_USERS_SLOW, "SkylakeX"},
    {"Prescott", TAGC_CPU_AVX2, "NoSuchCore", NULL, TAGC_BLAS_USERS_SLOW, "Haswell"},
    {"Haswell", TAGC_CPU_AVX2, "Haswell", NULL, TAGC_BLAS_RIGHT, NULL},
    {"Prescott", TAGC_CPU_SCALAR, "Prescott", NULL, TAGC_BLAS_RIGHT, NULL},
    /* never twice */
    {"Prescott", TAGC_CPU_AVX512, "SkylakeX", "SkylakeX", TAGC_BLAS_STAYS_SLOW, "SkylakeX"},
    {"Prescott", TAGC_CPU_AVX512, NULL, "SkylakeX", TAGC_BLAS_STAYS_SLOW, "SkylakeX"},
    {"Haswell", TAGC_CPU_AVX512, "SkylakeX", "", TAGC_BLAS_STAYS_SLOW, "SkylakeX"},
};

TEST(each_case_has_its_choice) {
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *better = "unset";
        tagc_blas_facts facts = {cases[i].kernel, cases[i].cpu, cases[i].asked, cases[i].begun};
        print_message("%s on %s\n", cases[i].kernel, tagc_cpu_name(cases[i].cpu));
        assert_int_equal(tagc_blas_choose(&facts, &better), cases[i].choice);
        if (cases[i].better)
            assert_string_equal(better, cases[i].better);
        else
            assert_null(better);
    }
}

/* What OpenBLAS would be told to use is right for that processor, so that beginning again ends it. */
TEST(what_is_better_is_right) {
    static const tagc_cpu levels[] = {TAGC_CPU_AVX2, TAGC_CPU_AVX512};
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++) {
        const char *better;
        tagc_blas_facts facts = {"Prescott", levels[i], NULL, NULL};
        assert_int_equal(tagc_blas_choose(&facts, &better), TAGC_BLAS_AGAIN);
        facts.kernel = better;
        assert_int_equal(tagc_blas_choose(&facts, &better), TAGC_BLAS_RIGHT);
    }
}

TEST(this_openblas_says_what_it_is) {
    tagc_blas_about about;
    tagc_blas_describe(&about);
    assert_int_equal(strncmp(about.name, "OpenBLAS ", 9), 0);
    assert_non_null(strchr("0123456789", about.name[9]));
    assert_null(strchr(about.name + 9, ' '));
    assert_true(*about.kernel != '\0');
    assert_true(about.n_threads >= 1);
}
