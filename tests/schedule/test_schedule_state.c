/* Saved states, and wrong arguments. */
#include "made.h"

#include <time.h>

static size_t saved(const tagc_schedule *s, int with_windows, uint8_t *bytes, size_t n_bytes) {
    size_t n, n_written;
    OK(tagc_schedule_save(s, with_windows, NULL, 0, &n));
    assert_true(n <= n_bytes);
    assert_int_equal(tagc_schedule_save(s, with_windows, bytes, n - 1, &n_written), TAGC_ERR_ARGUMENT);
    OK(tagc_schedule_save(s, with_windows, bytes, n, &n_written));
    assert_int_equal(n, n_written);
    return n;
}

enum { N = 5, MOST_BYTES = 1 << 16 };

/* In [-0.5, 0.5), the same for the same numbers. */
static double noise_of(unsigned step, uint32_t parameter, int element) {
    uint64_t x = (step * 64u + parameter) * 64u + (unsigned)element;
    for (int i = 0; i < 2; i++) x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u + 0x9e3779b97f4a7c15u;
    return (double)(x >> 11) * 0x1p-53 - 0.5;
}

/* One exchange of the model with random gradients of p0..p4, at their places in a schedule that may have another order. */
static void exchange(tagc_schedule *s, const uint32_t *place, unsigned step) {
    for (uint32_t i = 0; i < N; i++) {
        float values[32];
        uint32_t count = 32, full;
        size_t n_full;
        double direction = (step / 80 + i) % 4 == 0 ? 2 : 0;
        for (int k = 0; k < 32; k++)
            values[k] = (float)((i + 1) * (direction * (k % 3 - 1) + noise_of(step, i, k)));
        OK(tagc_schedule_add(s, &place[i], &count, 1, values, &full, &n_full));
        if (n_full == 0) continue;
        tagc_schedule_sums found;
        OK(tagc_schedule_take(s, &full, 1, &found));
        found.gradient = 1;
        found.residual = (step / 20) % 9 >= 7 ? 900 : 4;
        OK(tagc_schedule_see(s, &full, 1, &found, 3));
    }
    tagc_schedule_add_loss(s, 3 + 0.001 * (step % 5) + (step > 300 && step < 360 ? 1 : 0));
    if (step % 20 == 19) {
        tagc_schedule_losses losses;
        tagc_schedule_take_losses(s, &losses);
        OK(tagc_schedule_see_losses(s, &losses));
    }
    OK(tagc_schedule_step(s, NULL, NULL));
}

static tagc_schedule *with_order(const char *const *names) {
    static const char kinds[] = "cmcmc"; /* by name */
    tagc_schedule_parameter parameters[N];
    for (int i = 0; i < N; i++)
        parameters[i] = (tagc_schedule_parameter){
            names[i], 1000, kinds[names[i][1] - '0'] == 'm' ? TAGC_CLASS_MILD : TAGC_CLASS_COMPRESSED};
    tagc_schedule_options o;
    tagc_schedule_options_init(&o);
    o.fresh = 1;
    tagc_schedule *s;
    OK(tagc_schedule_create(&o, parameters, N, &s));
    set_all(s, N, TAGC_MOMENT_SHORTENS);
    return s;
}

TEST(resumed_runs_decide_alike) {
    const char *forth[] = {"p0", "p1", "p2", "p3", "p4"}, *back[] = {"p4", "p3", "p2", "p1", "p0"};
    const uint32_t in_order[] = {0, 1, 2, 3, 4}, reversed[] = {4, 3, 2, 1, 0};
    static uint8_t bytes[MOST_BYTES], again[MOST_BYTES];
    int seen[4] = {0}; /* levels where a run was stopped */
    for (unsigned stop = 1; stop < 420; stop += 37) {
        tagc_schedule *whole = with_order(forth), *resumed = with_order(back), *same = with_order(forth);
        for (unsigned step = 0; step < stop; step++) exchange(whole, in_order, step);
        for (uint32_t i = 0; i < N; i++) seen[level_of(whole, i)] = 1;
        size_t n_unknown = 9;
        OK(tagc_schedule_load(resumed, bytes, saved(whole, 1, bytes, sizeof bytes), 1, &n_unknown, NULL));
        assert_int_equal(n_unknown, 0);
        OK(tagc_schedule_load(same, bytes, saved(whole, 1, bytes, sizeof bytes), 1, NULL, NULL));
        for (unsigned step = stop; step < 500; step++) {
            size_t n = saved(whole, 1, bytes, sizeof bytes);
            assert_int_equal(saved(same, 1, again, sizeof again), n);
            assert_memory_equal(again, bytes, n);
            exchange(whole, in_order, step);
            exchange(same, in_order, step);
            exchange(resumed, reversed, step);
            for (uint32_t i = 0; i < N; i++) {
                tagc_schedule_plan a = plan_of(whole, i), b = plan_of(resumed, reversed[i]);
                assert_same_plan(&a, &b);
            }
        }
        tagc_schedule_destroy(whole);
        tagc_schedule_destroy(resumed);
        tagc_schedule_destroy(same);
    }
    assert_true(seen[0] && seen[1] && seen[2] + seen[3]);
}

typedef struct scene {
    double coherence, growth, square, loss;
} scene;

/* Half a window of losses before, half after: a state is saved between them. */
static void half_a_window(tagc_schedule *s, double loss) {
    tagc_schedule_losses losses = {12 * loss, 12 * loss * loss, 12};
    OK(tagc_schedule_see_losses(s, &losses));
}

static void play(tagc_schedule **s, const scene *scenes, int n, int stops, tagc_schedule_plan *plans) {
    static uint8_t bytes[MOST_BYTES];
    *s = made("ccm", NULL);
    set_all(*s, 2, TAGC_MOMENT_SHORTENS);
    for (int w = 0; w < n; w++) {
        half_a_window(*s, scenes[w].loss);
        if (stops) {
            size_t n_bytes = saved(*s, 1, bytes, sizeof bytes);
            tagc_schedule_destroy(*s);
            *s = made("ccm", NULL);
            set_all(*s, 2, TAGC_MOMENT_SHORTENS);
            OK(tagc_schedule_load(*s, bytes, n_bytes, 1, NULL, NULL));
        }
        half_a_window(*s, scenes[w].loss);
        for (uint32_t i = 0; i < 3; i++) {
            tagc_schedule_sums found =
                sums(i == 0 ? scenes[w].coherence : NOISE, i == 0 ? scenes[w].growth : 2);
            if (i == 0) found.square = scenes[w].square;
            OK(tagc_schedule_see(*s, &i, 1, &found, 0));
        }
        OK(tagc_schedule_step(*s, NULL, NULL));
        for (uint32_t i = 0; i < 3; i++) plans[3 * w + (int)i] = plan_of(*s, i);
    }
}

/* Each field of a state decides something within a window of when it was saved. */
TEST(a_run_that_stops_at_every_window_decides_alike) {
    const scene scenes[] = {
        {1, 2, 50, 3},   {1, 2, 50, 3},  {1, 2, 50, 3},  {1, 2, 50, 3},  {3, 2, 50, 3},   {1, 2, 50, 3},
        {1, 2, 50, 3},   {1, 2, 50, 3},  {1, 2, 50, 3},  {1, 2, 500, 3}, {1, 2, 50, 3},   {1, 21, 50, 3},
        {1, 2, 50, 3},   {1, 21, 50, 3}, {1, 21, 50, 3}, {1, 2, 50, 3},  {1, 2, 50, 3},   {1, 2, 50, 3},
        {1, 2, 50, 3},   {1, 2, 50, 3},  {1, 2, 50, 3},  {1, 2, 50, 3},  {1, 2, 50, 2.9}, {1, 2, 50, 3.1},
        {1, 2, 50, 3.1}, {1, 2, 50, 3},  {1, 2, 50, 3},
    };
    enum { N_SCENES = sizeof scenes / sizeof *scenes };
    tagc_schedule_plan whole[3 * N_SCENES], stopped[3 * N_SCENES];
    tagc_schedule *s;
    play(&s, scenes, N_SCENES, 0, whole);
    tagc_schedule_destroy(s);
    play(&s, scenes, N_SCENES, 1, stopped);
    tagc_schedule_destroy(s);
    int n_anew = 0;
    for (int i = 0; i < 3 * N_SCENES; i++) {
        assert_same_plan(&whole[i], &stopped[i]);
        n_anew += i > 2 && whole[i].level < whole[i - 3].level;
    }
    assert_int_equal(n_anew, 5); /* p0 for a direction, for its residual, and all three for the loss */
}

TEST(a_moment_that_is_not_known_to_be_short_begins_anew) {
    static uint8_t bytes[MOST_BYTES];
    const double noise[] = {NOISE, NOISE, NOISE};
    tagc_schedule *s = made("ccm", NULL), *other = made("ccm", NULL), *bare = made("ccm", NULL);
    set_all(s, 2, TAGC_MOMENT_SHORTENS);
    for (int w = 0; w < 6; w++) window(s, noise, 3);
    size_t n = saved(s, 1, bytes, sizeof bytes), n_unknown, unknown;
    OK(tagc_schedule_set_moment(other, 0, TAGC_MOMENT_SHORTENS));
    OK(tagc_schedule_load(other, bytes, n, 1, &n_unknown, &unknown));
    assert_int_equal(n_unknown, 1);
    assert_int_equal(unknown, 1);
    assert_int_equal(level_of(other, 0), TAGC_LEVEL_LAST);
    assert_int_equal(level_of(other, 1), TAGC_LEVEL_EVERY);
    assert_int_equal(level_of(other, 2), TAGC_LEVEL_EVERY);
    assert_near(plan_of(other, 0).moment, 0, 0);
    assert_near(plan_of(other, 1).moment, 1, 0);
    set_all(bare, 2, TAGC_MOMENT_NONE);
    OK(tagc_schedule_load(bare, bytes, n, 1, NULL, NULL));
    for (uint32_t i = 0; i < 3; i++) assert_int_equal(level_of(bare, i), TAGC_LEVEL_LAST);
    tagc_schedule_destroy(s);
    tagc_schedule_destroy(other);
    tagc_schedule_destroy(bare);
}

/* That goes for one that was about to become short, too, and is known from then on. */
TEST(a_moment_that_was_about_to_be_short_begins_anew) {
    static uint8_t bytes[MOST_BYTES];
    const double noise[] = {NOISE};
    tagc_schedule *s = made("c", NULL), *other = made("c", NULL), *third = made("c", NULL);
    set_all(s, 1, TAGC_MOMENT_SHORTENS);
    for (int w = 0; w < 20 && plan_of(s, 0).moment == 1; w++) window(s, noise, 1);
    assert_true(plan_of(s, 0).moment > 0 && plan_of(s, 0).moment < 1);
    size_t n_unknown;
    OK(tagc_schedule_load(other, bytes, saved(s, 1, bytes, sizeof bytes), 1, &n_unknown, NULL));
    assert_int_equal(n_unknown, 1);
    OK(tagc_schedule_load(third, bytes, saved(other, 1, bytes, sizeof bytes), 1, &n_unknown, NULL));
    assert_int_equal(n_unknown, 0);
    set_all(other, 1, TAGC_MOMENT_SHORTENS);
    assert_near(plan_of(other, 0).moment, 1, 0);
    tagc_schedule_destroy(s);
    tagc_schedule_destroy(other);
    tagc_schedule_destroy(third);
}

TEST(other_ranks_leave_windows_out) {
    static uint8_t bytes[MOST_BYTES], others[MOST_BYTES];
    const char *names[] = {"p0", "p1", "p2", "p3", "p4"};
    const uint32_t place[] = {0, 1, 2, 3, 4};
    tagc_schedule *s = with_order(names), *other = with_order(names);
    for (unsigned step = 0; step < 133; step++) exchange(s, place, step);
    OK(tagc_schedule_load(other, bytes, saved(s, 1, bytes, sizeof bytes), 0, NULL, NULL));
    size_t n = saved(s, 0, bytes, sizeof bytes);
    assert_int_equal(saved(other, 1, others, sizeof others), n);
    assert_memory_equal(bytes, others, n);
    tagc_schedule_destroy(s);
    tagc_schedule_destroy(other);
}

TEST(what_a_state_lacks_is_last_and_what_it_has_more_is_dropped) {
    static uint8_t bytes[MOST_BYTES];
    tagc_schedule *few = made("c", NULL), *many = made("ccc", NULL);
    OK(tagc_schedule_load(many, bytes, saved(few, 1, bytes, sizeof bytes), 1, NULL, NULL));
    assert_int_equal(level_of(many, 0), TAGC_LEVEL_EVERY);
    assert_int_equal(level_of(many, 2), TAGC_LEVEL_LAST);
    OK(tagc_schedule_load(few, bytes, saved(many, 1, bytes, sizeof bytes), 1, NULL, NULL));
    assert_int_equal(level_of(few, 0), TAGC_LEVEL_EVERY);
    tagc_schedule_destroy(few);
    tagc_schedule_destroy(many);
}

/* Every cut, and every byte changed: either it is refused and changes nothing, or the schedule still works. */
TEST(damaged_states_are_refused) {
    static uint8_t bytes[MOST_BYTES], damaged[MOST_BYTES], now[MOST_BYTES], then[MOST_BYTES];
    const char *names[] = {"p0", "p1", "p2", "p3", "p4"};
    const uint32_t place[] = {0, 1, 2, 3, 4};
    tagc_schedule *s = with_order(names), *other = with_order(names);
    for (unsigned step = 0; step < 130; step++) exchange(s, place, step);
    size_t n = saved(s, 1, bytes, sizeof bytes), n_refused = 0;
    for (size_t cut = 0; cut < n; cut += cut < 400 ? 1 : 97)
        assert_int_equal(tagc_schedule_load(other, bytes, cut, 1, NULL, NULL), TAGC_ERR_CORRUPT);
    assert_int_equal(tagc_schedule_load(other, bytes, n + 1, 1, NULL, NULL), TAGC_ERR_CORRUPT);
    assert_int_equal(tagc_schedule_load(other, NULL, 0, 1, NULL, NULL), TAGC_ERR_CORRUPT);
    for (size_t at = 0; at < n; at++) {
        memcpy(damaged, bytes, n);
        damaged[at] ^= (uint8_t)(1 + at % 255);
        size_t n_before = saved(other, 1, now, sizeof now);
        if (tagc_schedule_load(other, damaged, n, 1, NULL, NULL) != TAGC_OK) {
            n_refused++;
            assert_int_equal(saved(other, 1, then, sizeof then), n_before);
            assert_memory_equal(now, then, n_before);
        }
        for (unsigned step = 0; at % 64 == 0 && step < 21; step++) exchange(other, place, step);
    }
    assert_true(n_refused > 50);
    tagc_schedule_destroy(s);
    tagc_schedule_destroy(other);
}

TEST(wrong_arguments_are_named) {
    tagc_schedule_options o, wrong;
    tagc_schedule_options_init(&o);
    tagc_schedule *s;
    const tagc_schedule_parameter good = {"p", 10, TAGC_CLASS_COMPRESSED};
#define REFUSED(call, text)                                                                                  \
    do {                                                                                                     \
        assert_int_equal(call, TAGC_ERR_ARGUMENT);                                                           \
        if (!strstr(tagc_last_error(), text)) fail_msg("\"%s\" lacks \"%s\"", tagc_last_error(), text);      \
    } while (0)
#define WRONG_OPTION(field, value, text)                                                                     \
    do {                                                                                                     \
        wrong = o;                                                                                           \
        wrong.field = value;                                                                                 \
        REFUSED(tagc_schedule_create(&wrong, &good, 1, &s), text);                                           \
        assert_null(s);                                                                                      \
    } while (0)
    WRONG_OPTION(gentle, 2, "gentle is 2");
    WRONG_OPTION(fresh, -1, "fresh is -1");
    WRONG_OPTION(sparsity, 1.5, "sparsity is 1.5");
    WRONG_OPTION(sparsity, (double)NAN, "sparsity is");
    WRONG_OPTION(mild_sparsity, -1, "mild_sparsity is -1");
    WRONG_OPTION(format, (tagc_format)5,
                 "format is 5, must be fp32 (0), bf16 (1), int8 (2), int4 (3) or int2 (4)");
    WRONG_OPTION(mild_format, (tagc_format)-1, "mild_format is -1");
    WRONG_OPTION(short_beta1, 1, "short_beta1 is 1");
    WRONG_OPTION(struct_bytes, 3, "struct_bytes of tagc_schedule_options is 3");
    const tagc_schedule_parameter twice[] = {good, good}, unnamed = {"", 10, 0}, empty = {"p", 0, 0},
                                  other = {"p", 1, 5};
    REFUSED(tagc_schedule_create(&o, twice, 2, &s), "two parameters are named \"p\"");
    REFUSED(tagc_schedule_create(&o, &unnamed, 1, &s), "name must have 1 to 1023 bytes");
    REFUSED(tagc_schedule_create(&o, &empty, 1, &s), "n_elems is 0");
    REFUSED(tagc_schedule_create(&o, &other, 1, &s), "kind is 5");
    REFUSED(tagc_schedule_create(&o, NULL, 1, &s), "parameters is NULL");
    OK(tagc_schedule_create(&o, NULL, 0, &s));
    OK(tagc_schedule_step(s, NULL, NULL));
    tagc_schedule_destroy(s);
    s = made("cm", NULL);
    const uint32_t beyond = 2, both[] = {0, 1}, count = 513;
    tagc_schedule_plan plan;
    uint32_t full;
    size_t n_full;
    float value = 0;
    REFUSED(tagc_schedule_get_plan(s, &beyond, NULL, 1, &plan), "parameters[0] is 2, must be below 2");
    REFUSED(tagc_schedule_get_plan(s, both, NULL, 2, &plan), "two classes");
    REFUSED(tagc_schedule_get_plan(s, both, NULL, 0, &plan), "n is 0");
    REFUSED(tagc_schedule_add(s, both, &count, 1, &value, &full, &n_full), "counts[0] is 513");
    REFUSED(tagc_schedule_set_moment(s, 2, TAGC_MOMENT_NONE), "parameter is 2");
    REFUSED(tagc_schedule_set_moment(s, 0, (tagc_moment)3), "moment is 3");
    REFUSED(tagc_schedule_scale(s, 0), "factor is 0");
    REFUSED(tagc_schedule_scale(s, (double)INFINITY), "factor is inf");
    tagc_schedule_destroy(s);
    tagc_schedule_destroy(NULL);
    assert_string_equal(tagc_level_name(0), "fresh");
    assert_string_equal(tagc_level_name(3), "last");
    assert_string_equal(tagc_level_name(4), "?");
}

/* Names that begin alike, in any order; and a load of many parameters takes no n^2 steps. */
static double load_many(size_t n) {
    tagc_schedule_parameter *parameters = calloc(n, sizeof *parameters);
    char(*names)[24] = calloc(n, sizeof *names);
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "p%zu", (i * 7919) % n);
        parameters[i] = (tagc_schedule_parameter){names[i], 1, TAGC_CLASS_COMPRESSED};
    }
    tagc_schedule *one, *other;
    tagc_schedule_options options;
    tagc_schedule_options_init(&options);
    OK(tagc_schedule_create(&options, parameters, n, &one));
    for (uint32_t i = 0; i < n; i += 3) {
        tagc_schedule_sums found = sums(NOISE, 2);
        OK(tagc_schedule_set_moment(one, i, TAGC_MOMENT_NONE));
        OK(tagc_schedule_see(one, &i, 1, &found, NOISE_GROUP));
        if (i > 3 * 64) break; /* a step takes n^2 of those that were seen */
    }
    OK(tagc_schedule_step(one, NULL, NULL));
    for (size_t i = 0; i < n / 2; i++) { /* the other one has them in another order */
        tagc_schedule_parameter p = parameters[i];
        parameters[i] = parameters[n - 1 - i];
        parameters[n - 1 - i] = p;
    }
    OK(tagc_schedule_create(&options, parameters, n, &other));
    size_t n_bytes;
    OK(tagc_schedule_save(one, 1, NULL, 0, &n_bytes));
    void *bytes = malloc(n_bytes);
    OK(tagc_schedule_save(one, 1, bytes, n_bytes, &n_bytes));
    clock_t begin = clock();
    OK(tagc_schedule_load(other, bytes, n_bytes, 1, NULL, NULL));
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    for (uint32_t i = 0; i < n; i++) assert_int_equal(level_of(other, (uint32_t)n - 1 - i), level_of(one, i));
    tagc_schedule_destroy(one);
    tagc_schedule_destroy(other);
    free(bytes);
    free(names);
    free(parameters);
    return seconds;
}

TEST(many_parameters_are_loaded_by_name) {
    double few = load_many(2500), many = load_many(20000);
    if (many > 32 * (few + 1e-3)) fail_msg("8 times the parameters take %.0f times as long", many / few);
}
