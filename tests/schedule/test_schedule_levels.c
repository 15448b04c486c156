/* Levels: who goes on when, who begins anew, and what nothing is decided from. */
#include "made.h"

TEST(noise_goes_on_when_its_moment_is_short) {
    tagc_schedule *s = made("ccc", NULL);
    OK(tagc_schedule_set_moment(s, 0, TAGC_MOMENT_SHORTENS));
    OK(tagc_schedule_set_moment(s, 1, TAGC_MOMENT_NONE));
    const double noise[] = {NOISE, NOISE, 1.29};
    int expected[][3] = {{1, 2, 1}, {2, 3, 1}, {3, 3, 2}}; /* p2 follows once half are further */
    double moments[] = {0.5, 0, 0};
    for (int w = 0; w < 3; w++) {
        window(s, noise, 3);
        for (uint32_t i = 0; i < 3; i++) assert_int_equal(level_of(s, i), expected[w][i]);
        assert_near(plan_of(s, 0).moment, moments[w], 1e-12);
    }
    for (int w = 0; w < 20; w++) window(s, noise, 3);
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_LARGEST); /* with a long first moment it goes no further */
    assert_near(plan_of(s, 2).moment, 1, 0);
    tagc_schedule_destroy(s);
}

TEST(a_moment_that_becomes_long_spoils_no_selection) {
    tagc_schedule *s = made("ccc", NULL);
    set_all(s, 3, TAGC_MOMENT_NONE);
    const double noise[] = {NOISE, NOISE, NOISE};
    for (int w = 0; w < 2; w++) window(s, noise, 3);
    OK(tagc_schedule_set_moment(s, 0, TAGC_MOMENT_SHORTENS)); /* short at once */
    OK(tagc_schedule_set_moment(s, 1, TAGC_MOMENT_STAYS));    /* nobody can make it short */
    assert_int_equal(level_of(s, 1), TAGC_LEVEL_LAST);        /* until the end of this exchange */
    for (int w = 0; w < 3; w++) {
        OK(tagc_schedule_step(s, NULL, NULL));
        assert_int_equal(level_of(s, 0), TAGC_LEVEL_LAST);
        assert_near(plan_of(s, 0).moment, 0, 0);
        assert_int_equal(level_of(s, 1), TAGC_LEVEL_EVERY);
        assert_int_equal(level_of(s, 2), TAGC_LEVEL_LAST);
    }
    tagc_schedule_destroy(s);
}

TEST(plans_say_what_travels) {
    tagc_schedule_options o;
    tagc_schedule_options_init(&o);
    o.fresh = 1;
    tagc_schedule *s = made("cm", &o);
    set_all(s, 2, TAGC_MOMENT_NONE);
    const double noise[] = {NOISE, NOISE};
    const struct {
        int level, format, block;
        double sparsity;
    } steps[] = {{0, TAGC_FORMAT_INT8, 0, 0},    {0, TAGC_FORMAT_INT8, 0, 0},
                 {0, TAGC_FORMAT_INT8, 0, 0},    {1, TAGC_FORMAT_INT4, 32, 0},
                 {2, TAGC_FORMAT_INT4, 0, 0.92}, {3, TAGC_FORMAT_INT2, 0, 0.95}};
    for (size_t w = 0; w < sizeof steps / sizeof *steps; w++) {
        tagc_schedule_plan plan = plan_of(s, 0), asked;
        OK(tagc_schedule_plan_of_level(&o, TAGC_CLASS_COMPRESSED, steps[w].level, &asked));
        assert_int_equal(asked.level, steps[w].level);
        assert_int_equal(asked.format, steps[w].format);
        assert_int_equal(asked.block, steps[w].block);
        assert_near(asked.sparsity, steps[w].sparsity, 1e-9);
        assert_int_equal(plan.level, steps[w].level);
        assert_int_equal(plan.format, steps[w].format);
        assert_int_equal(plan.block, steps[w].block);
        assert_near(plan.sparsity, steps[w].sparsity, 1e-12);
        window(s, noise, 2);
    }
    tagc_schedule_plan mild = plan_of(s, 1);
    assert_int_equal(mild.level, TAGC_LEVEL_LAST);
    assert_int_equal(mild.format, TAGC_FORMAT_INT4);
    assert_near(mild.sparsity, 0.85, 1e-12);
    tagc_schedule_destroy(s);
}

/* Of mild parameters, of those that have no levels, and what is none. */
TEST(plans_of_levels_without_a_schedule) {
    tagc_schedule_options o;
    tagc_schedule_plan plan;
    tagc_schedule_options_init(&o);
    OK(tagc_schedule_plan_of_level(NULL, TAGC_CLASS_MILD, TAGC_LEVEL_LAST, &plan));
    assert_int_equal(plan.format, TAGC_FORMAT_INT4);
    assert_near(plan.sparsity, 0.85, 1e-12);
    OK(tagc_schedule_plan_of_level(NULL, TAGC_CLASS_MILD, TAGC_LEVEL_LARGEST, &plan));
    assert_int_equal(plan.level, TAGC_LEVEL_EVERY); /* where it stays until LAST */
    o.gentle = 0;
    o.sparsity = 0.5;
    o.format = TAGC_FORMAT_BF16;
    OK(tagc_schedule_plan_of_level(&o, TAGC_CLASS_COMPRESSED, TAGC_LEVEL_EVERY, &plan));
    assert_int_equal(plan.level, TAGC_LEVEL_LAST);
    assert_int_equal(plan.format, TAGC_FORMAT_BF16);
    assert_near(plan.sparsity, 0.5, 1e-12);
    assert_int_equal(tagc_schedule_plan_of_level(&o, TAGC_CLASS_MILD, 4, &plan), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_schedule_plan_of_level(&o, TAGC_CLASS_DENSE, TAGC_LEVEL_LAST, &plan),
                     TAGC_ERR_ARGUMENT);
}

TEST(a_direction_holds_back_and_a_weak_one_follows) {
    tagc_schedule *s = made("cccc", NULL);
    set_all(s, 4, TAGC_MOMENT_NONE);
    const double first[] = {NOISE, NOISE, 2.1, 2.3};
    window(s, first, 4);
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_EVERY);
    window(s, first, 4); /* half of them are further now */
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_LARGEST);
    assert_int_equal(level_of(s, 3), TAGC_LEVEL_EVERY);
    tagc_schedule_destroy(s);
}

TEST(what_has_a_direction_again_begins_anew_and_waits_longer) {
    tagc_schedule *s = made("c", NULL);
    set_all(s, 1, TAGC_MOMENT_NONE);
    const double noise = NOISE, direction = 2.7;
    for (int failures = 0; failures < 5; failures++) {
        for (int w = 0; w < 1 << failures; w++) {
            assert_int_equal(level_of(s, 0), TAGC_LEVEL_EVERY);
            window(s, &noise, 1);
        }
        assert_int_equal(level_of(s, 0), TAGC_LEVEL_LARGEST);
        window(s, &direction, 1);
        tagc_alarm alarms[TAGC_N_ALARM_KINDS];
        size_t n;
        tagc_schedule_take_alarms(s, alarms, &n);
        assert_int_equal(n, 1);
        assert_int_equal(alarms[0].kind, TAGC_ALARM_DIRECTION);
        assert_near(alarms[0].value, 2.7, 1e-12);
        char text[512], shortest[8];
        tagc_schedule_alarm_text(s, &alarms[0], text, sizeof text);
        assert_non_null(strstr(text, "the gradient of p0 points one way again (2.7 times"));
        tagc_schedule_alarm_text(s, &alarms[0], shortest, sizeof shortest);
        assert_string_equal(shortest, "the gra");
        tagc_schedule_take_alarms(s, alarms, &n);
        assert_int_equal(n, 0);
    }
    tagc_schedule_destroy(s);
}

TEST(a_fading_moment_comes_back_with_a_direction) {
    tagc_schedule_options o;
    tagc_schedule_options_init(&o);
    o.fresh = 1;
    tagc_schedule *s = made("c", &o);
    set_all(s, 1, TAGC_MOMENT_SHORTENS);
    const double noise = NOISE, direction = 3;
    for (int w = 0; w < 3 + 4; w++) window(s, &noise, 1);
    assert_near(plan_of(s, 0).moment, 0.5, 1e-12); /* it began when the third window ended */
    window(s, &direction, 1);
    assert_near(plan_of(s, 0).moment, 1, 0);
    for (int w = 0; w < 10; w++) {
        assert_int_equal(level_of(s, 0), TAGC_LEVEL_EVERY);
        window(s, &noise, 1);
    }
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_LARGEST);
    assert_near(plan_of(s, 0).moment, 0, 0);
    window(s, &direction, 1); /* short for good: of all that is compressed it was */
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_EVERY);
    assert_near(plan_of(s, 0).moment, 0, 0);
    tagc_schedule_destroy(s);
}

static void expect_growth(tagc_schedule *s, const double *growths, const int *levels, int n) {
    uint32_t p = 0;
    for (int w = 0; w < n; w++) {
        tagc_schedule_sums found = sums(NOISE, growths[w]);
        OK(tagc_schedule_see(s, &p, 1, &found, 0));
        OK(tagc_schedule_step(s, NULL, NULL));
        assert_int_equal(level_of(s, 0), levels[w]);
    }
}

TEST(a_residual_must_outgrow_twice) {
    tagc_schedule *s = made("c", NULL);
    set_all(s, 1, TAGC_MOMENT_NONE);
    const double noise = NOISE;
    for (int w = 0; w < 2; w++) window(s, &noise, 1);
    const double growths[] = {21, 19, 21, 21};
    const int levels[] = {3, 3, 3, 1};
    expect_growth(s, growths, levels, 4);
    tagc_schedule_destroy(s);
    s = made("c", NULL);
    set_all(s, 1, TAGC_MOMENT_NONE);
    const double always[] = {2, 2, 21, 21, 21, 21, 21, 21};
    const int later[] = {2, 3, 3, 1, 1, 2, 2, 1}; /* what began anew is given time */
    expect_growth(s, always, later, 8);
    tagc_schedule_destroy(s);
}

static void hand_over_losses(tagc_schedule *s, double mean, double spread) {
    for (int i = 0; i < 24; i++) tagc_schedule_add_loss(s, mean + (i % 2 ? spread : -spread));
    tagc_schedule_add_loss(s, (double)NAN);
    tagc_schedule_losses losses;
    tagc_schedule_take_losses(s, &losses);
    assert_near(losses.n, 24, 0);
    OK(tagc_schedule_see_losses(s, &losses));
}

TEST(a_loss_must_rise_twice_and_beyond_chance) {
    tagc_schedule *s = made("c", NULL);
    set_all(s, 1, TAGC_MOMENT_NONE);
    const double noise = NOISE;
    for (int w = 0; w < 2; w++) window(s, &noise, 1);
    const struct {
        double mean, spread;
        int level;
    } steps[] = {{3, 0.01, 3}, {3.05, 0.01, 3}, {3.2, 0.01, 3}, {3.2, 2, 3}, {3.2, 0.01, 3}, {3.2, 0.01, 1}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        hand_over_losses(s, steps[i].mean, steps[i].spread);
        OK(tagc_schedule_step(s, NULL, NULL));
        assert_int_equal(level_of(s, 0), steps[i].level);
    }
    tagc_schedule_losses wrong = {(double)NAN, 1, 1};
    assert_int_equal(tagc_schedule_see_losses(s, &wrong), TAGC_ERR_ARGUMENT);
    tagc_schedule_destroy(s);
}

TEST(mild_ones_wait_for_the_compressed) {
    tagc_schedule *s = made("ccm", NULL);
    set_all(s, 2, TAGC_MOMENT_SHORTENS);
    const double noise[] = {NOISE, NOISE, NOISE};
    window(s, noise, 3);
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_EVERY);
    window(s, noise, 3); /* all first moments are short */
    window(s, noise, 3);
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_LAST);
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_LAST);
    tagc_schedule_destroy(s);
}

/* The engine says of all parameters that their moment shortens, PyTorch of compressed ones alone. Where one of these keeps a
 * direction, and so a long moment, no mild one goes on that is noise; one with a weak direction follows. */
TEST(what_is_said_of_a_mild_moment_has_no_effect_beside_compressed_ones) {
    tagc_schedule *of_all = made("ccmm", NULL), *of_compressed = made("ccmm", NULL),
                  *other = made("ccmm", NULL);
    set_all(of_all, 4, TAGC_MOMENT_SHORTENS);
    set_all(of_compressed, 2, TAGC_MOMENT_SHORTENS);
    set_all(other, 2, TAGC_MOMENT_SHORTENS);
    const double found[] = {NOISE, 2.1, NOISE, 2.1};
    for (int w = 0; w < 8; w++) {
        for (uint32_t i = 2; i < 4; i++)
            OK(tagc_schedule_set_moment(other, i, w % 2 ? TAGC_MOMENT_NONE : TAGC_MOMENT_STAYS));
        window(of_all, found, 4);
        window(of_compressed, found, 4);
        window(other, found, 4);
        for (uint32_t i = 0; i < 4; i++) {
            tagc_schedule_plan all = plan_of(of_all, i), compressed = plan_of(of_compressed, i),
                               others = plan_of(other, i);
            assert_same_plan(&all, &compressed);
            assert_same_plan(&all, &others);
        }
    }
    assert_int_equal(level_of(of_all, 0), TAGC_LEVEL_LAST);
    assert_int_equal(level_of(of_all, 1), TAGC_LEVEL_LARGEST);
    assert_int_equal(level_of(of_all, 2), TAGC_LEVEL_EVERY);
    assert_int_equal(level_of(of_all, 3), TAGC_LEVEL_LAST);
    tagc_schedule_destroy(of_all);
    tagc_schedule_destroy(of_compressed);
    tagc_schedule_destroy(other);
}

/* Adapters of attention alone: the compressed parameter is frozen, and holds nothing up. Nobody shortens a mild moment. */
TEST(mild_ones_alone_go_on_by_their_own_moment) {
    for (int moment = TAGC_MOMENT_STAYS; moment <= TAGC_MOMENT_NONE; moment++) {
        tagc_schedule *s = made("mcm", NULL);
        OK(tagc_schedule_set_moment(s, 0, (tagc_moment)moment));
        OK(tagc_schedule_set_moment(s, 2, (tagc_moment)moment));
        for (int w = 0; w < 2; w++) {
            for (uint32_t i = 0; i < 3; i += 2) {
                tagc_schedule_sums found = sums(NOISE, 2);
                OK(tagc_schedule_see(s, &i, 1, &found, NOISE_GROUP));
            }
            OK(tagc_schedule_step(s, NULL, NULL));
        }
        int expected = moment == TAGC_MOMENT_STAYS ? TAGC_LEVEL_EVERY : TAGC_LEVEL_LAST;
        assert_int_equal(level_of(s, 0), expected);
        assert_int_equal(level_of(s, 2), expected);
        assert_near(plan_of(s, 0).moment, 1, 0);
        tagc_schedule_destroy(s);
    }
}

/* The first window of a model: a compressed parameter behind it in the list holds a mild one up. */
TEST(a_mild_one_sees_who_is_trained_beside_it_at_once) {
    tagc_schedule *s = made("mc", NULL);
    set_all(s, 2, TAGC_MOMENT_SHORTENS);
    const double noise[] = {NOISE, NOISE};
    window(s, noise, 2);
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_EVERY);
    tagc_schedule_destroy(s);
}

TEST(noise_waits_for_its_own_moment_and_follows_nobody) {
    tagc_schedule_options o;
    tagc_schedule_options_init(&o);
    o.fresh = 1;
    tagc_schedule *s = made("ccc", &o);
    set_all(s, 2, TAGC_MOMENT_NONE);
    OK(tagc_schedule_set_moment(s, 2, TAGC_MOMENT_SHORTENS));
    const double noise[] = {NOISE, NOISE, NOISE};
    for (int w = 0; w < 3 + 9; w++) {
        assert_true(level_of(s, 2) <= TAGC_LEVEL_EVERY);
        window(s, noise, 3);
    }
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_LAST);
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_LARGEST);
    tagc_schedule_destroy(s);
}

TEST(a_mild_one_waits_for_its_own_group) {
    tagc_schedule *s = made("cmc", NULL);
    OK(tagc_schedule_set_moment(s, 0, TAGC_MOMENT_SHORTENS));
    for (int w = 0; w < 6; w++) {
        for (uint32_t i = 0; i < 3; i++) {
            tagc_schedule_sums found = sums(NOISE, 2);
            OK(tagc_schedule_see(s, &i, 1, &found, i > 0));
        }
        OK(tagc_schedule_step(s, NULL, NULL));
    }
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_LAST);
    assert_int_equal(level_of(s, 1), TAGC_LEVEL_EVERY); /* p2 keeps its first moment */
    tagc_schedule_destroy(s);
}

TEST(nothing_is_decided_from_nothing) {
    tagc_schedule *s = made("ccc", NULL);
    set_all(s, 3, TAGC_MOMENT_NONE);
    uint32_t all[] = {0, 1, 2};
    int through;
    for (int w = 0; w < 3; w++) {
        tagc_schedule_sums found[] = {{0}, sums((double)NAN, 2), sums(NOISE, 2)};
        OK(tagc_schedule_see(s, all, 3, found, 0));
        OK(tagc_schedule_step(s, NULL, &through));
        assert_int_equal(level_of(s, 0), TAGC_LEVEL_EVERY); /* frozen or unused */
        assert_int_equal(level_of(s, 1), TAGC_LEVEL_EVERY); /* not finite */
        assert_false(through);                              /* of what is seen, p1 waits */
    }
    assert_int_equal(level_of(s, 2), TAGC_LEVEL_LAST);
    int changed;
    OK(tagc_schedule_step(s, &changed, &through));
    assert_false(changed || through);
    tagc_schedule_destroy(s);
}

/* Ranks of an expert have parameters that others lack. What all of them hold must get the same plans. */
TEST(other_groups_change_nothing) {
    tagc_schedule *few = made("cccm", NULL), *many = made("cccmcccc", NULL);
    set_all(few, 4, TAGC_MOMENT_SHORTENS);
    set_all(many, 8, TAGC_MOMENT_SHORTENS);
    srand(5);
    for (int w = 0; w < 200; w++) {
        for (uint32_t i = 0; i < 8; i++) {
            double coherence = 0.8 + 2.2 * pow(rand() / (double)RAND_MAX, 3);
            tagc_schedule_sums found = sums(coherence, 2);
            if (i < 4) OK(tagc_schedule_see(few, &i, 1, &found, 1));
            OK(tagc_schedule_see(many, &i, 1, &found, i < 4 ? 1 : 2));
        }
        OK(tagc_schedule_step(few, NULL, NULL));
        OK(tagc_schedule_step(many, NULL, NULL));
        for (uint32_t i = 0; i < 4; i++) {
            tagc_schedule_plan a = plan_of(few, i), b = plan_of(many, i);
            assert_same_plan(&a, &b);
        }
    }
    tagc_schedule_destroy(few);
    tagc_schedule_destroy(many);
}

TEST(the_order_of_units_changes_nothing) {
    tagc_schedule *one = made("ccccmm", NULL), *other = made("ccccmm", NULL);
    set_all(one, 6, TAGC_MOMENT_SHORTENS);
    set_all(other, 6, TAGC_MOMENT_SHORTENS);
    srand(6);
    for (int w = 0; w < 200; w++) {
        tagc_schedule_sums found[6];
        for (int i = 0; i < 6; i++) found[i] = sums(0.8 + 2.2 * pow(rand() / (double)RAND_MAX, 3), 2);
        for (uint32_t i = 0; i < 6; i++) {
            uint32_t back = 5 - i;
            OK(tagc_schedule_see(one, &i, 1, &found[i], 0));
            OK(tagc_schedule_see(other, &back, 1, &found[back], 0));
        }
        OK(tagc_schedule_step(one, NULL, NULL));
        OK(tagc_schedule_step(other, NULL, NULL));
        for (uint32_t i = 0; i < 6; i++) {
            tagc_schedule_plan a = plan_of(one, i), b = plan_of(other, i);
            assert_same_plan(&a, &b);
        }
    }
    tagc_schedule_destroy(one);
    tagc_schedule_destroy(other);
}

TEST(without_levels_all_is_last) {
    tagc_schedule_options o;
    tagc_schedule_options_init(&o);
    o.gentle = 0;
    tagc_schedule *s = made("cm", &o);
    set_all(s, 2, TAGC_MOMENT_SHORTENS);
    const double direction[] = {10, 10};
    for (int w = 0; w < 3; w++) assert_false(window(s, direction, 2));
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_LAST);
    assert_near(plan_of(s, 0).moment, 0, 0);
    assert_int_equal(plan_of(s, 0).n_selected, 0);
    tagc_schedule_destroy(s);
    o.gentle = 1;
    o.sparsity = 0;
    s = made("cm", &o);
    assert_int_equal(level_of(s, 0), TAGC_LEVEL_LAST);
    assert_near(plan_of(s, 0).sparsity, 0, 0);
    assert_int_equal(level_of(s, 1), TAGC_LEVEL_EVERY);
    tagc_schedule_destroy(s);
}

TEST(those_exchanged_as_one_are_as_careful_as_the_most_careful) {
    tagc_schedule *s = made("cc", NULL);
    set_all(s, 2, TAGC_MOMENT_NONE);
    const double one[] = {NOISE, 5};
    for (int w = 0; w < 3; w++) window(s, one, 2);
    const uint32_t both[] = {0, 1}, mixed[] = {0, 0};
    tagc_schedule_plan plan;
    OK(tagc_schedule_get_plan(s, both, NULL, 2, &plan));
    assert_int_equal(plan.level, TAGC_LEVEL_EVERY);
    assert_near(plan.sparsity, 0, 0);
    assert_int_equal(plan.n_selected, 0);
    OK(tagc_schedule_get_plan(s, mixed, NULL, 2, &plan));
    assert_int_equal(plan.level, TAGC_LEVEL_LAST);
    assert_int_equal(plan.n_selected, 40); /* 60 exchanges, of 20, 40, 80 */
    tagc_schedule_destroy(s);
}
