/* Turns iteration times into advice. Compression is recommended only if the fastest arm with it pays (tagc_verdict_of)
 * against the fastest without, of any sharding and wire: by more than the rounds differ, and by more than one arm differs
 * from itself. An arm that sends no fewer bytes is none with compression, whatever its options say. A second comparison
 * stays within one kind of sharding, for users whose memory requires it. */
#include "bench/bench.h"

#include "files/result_file.h"
#include "launch/human.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const shardings[] = {"full sharding", "ZeRO-2", "replication", "hybrid sharding"};

/* What differs by less than the margin is the same, bytes as times. */
static int sends_less(const tagc_bench_candidate *packed, const tagc_bench_candidate *plain) {
    int is_known = packed->n_bytes > 0 && plain->n_bytes > 0;
    return !is_known || packed->n_bytes * (1 + TAGC_VERDICT_MARGIN) < plain->n_bytes;
}

/* The fastest arm with or without compression, of one sharding or (-1) of any; -1 if there is none. With it: of those that
 * send less than the fastest without. */
static int fastest(const tagc_bench_candidate *candidates, int n, int is_compressed, int sharding) {
    int best = -1, plain = is_compressed ? fastest(candidates, n, 0, -1) : -1;
    for (int i = 0; i < n; i++) {
        const tagc_bench_candidate *c = &candidates[i];
        if (c->is_compressed != is_compressed || (sharding >= 0 && c->sharding != sharding)) continue;
        if (plain >= 0 && !sends_less(c, &candidates[plain])) continue;
        if (best < 0 || c->total_s < candidates[best].total_s) best = i;
    }
    return best;
}

static int any_compresses(const tagc_bench_candidate *candidates, int n) {
    for (int i = 0; i < n; i++)
        if (candidates[i].is_compressed) return 1;
    return 0;
}

/* What an iteration of `slow` takes, in iterations of `fast`, round by round. */
static tagc_result_spread ratio_of(const tagc_bench_candidate *slow, const tagc_bench_candidate *fast,
                                   int n_rounds) {
    enum { MAX_ROUNDS = 1000 };
    double ratios[MAX_ROUNDS];
    int n = n_rounds < MAX_ROUNDS ? n_rounds : MAX_ROUNDS;
    for (int i = 0; i < n; i++) ratios[i] = slow->round_s[i] / fast->round_s[i];
    return tagc_result_spread_of(ratios, n);
}

/* By how much an arm differs from itself, at most; 0: it had no second turns. */
static double noise_of(tagc_result_spread again) {
    return again.n > 0 ? fmax(fabs(again.max - 1), fabs(again.min - 1)) : 0;
}

/* By what the arms of a round took, which ran one after the other: a machine that slows down slows both. *is_unsteady: 1
 * if the rounds, or two turns of one arm, differ by more than the arms do. Few rounds do not say by how much rounds
 * differ. */
static tagc_verdict judge(const tagc_bench_candidate *plain, const tagc_bench_candidate *packed, int n_rounds,
                          tagc_result_spread again, int *is_unsteady) {
    tagc_result_spread cost = ratio_of(packed, plain, n_rounds);
    double spread = fmax(noise_of(again), fmax(cost.max - cost.median, cost.median - cost.min));
    tagc_verdict verdict = tagc_verdict_of(1, cost.median, spread);
    *is_unsteady = verdict != tagc_verdict_of(1, cost.median, 0);
    return n_rounds < TAGC_BENCH_LEAST_ROUNDS ? TAGC_VERDICT_UNKNOWN : verdict;
}

static void say(tagc_bench_advice *out, const char *format, ...) {
    size_t used = strlen(out->reason);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out->reason + used, sizeof out->reason - used, format, arguments);
    va_end(arguments);
}

/* Says what an iteration without compression waits for, and what limits the compressed one: codec, link or computing, if it is
 * most of what there is to explain. */
static void say_limit(tagc_bench_advice *out, const tagc_bench_candidate *plain,
                      const tagc_bench_candidate *packed) {
    double exposed = plain->exposed_s / plain->total_s, left = packed->exposed_s / packed->total_s;
    char text[24], all[24];
    say(out, "; %s waits for parameters and gradients for %.0f %% of its time", plain->name, 100 * exposed);
    if (exposed < 0.05) {
        say(out, ", so computing is the limit");
        return;
    }
    say(out, ", %s in %.0f %%", packed->name, 100 * left);
    tagc_human_time(packed->total_s, all);
    if (packed->codec_s > packed->comm_s && packed->codec_s > packed->compute_s)
        say(out, "; its codec is the limit: it works %s of the %s (the wire is busy for less)",
            tagc_human_time(packed->codec_s, text), all);
    else if (packed->link_s >= packed->total_s)
        say(out, "; the link is the limit: its bytes fill it all the time");
    else if (packed->link_s > packed->compute_s && 2 * packed->link_s > packed->exposed_s)
        say(out, "; the link is the limit: its bytes fill it for %s of the %s",
            tagc_human_time(packed->link_s, text), all);
    else if (2 * packed->compute_s > packed->total_s)
        say(out, "; computing is the limit: it takes %s of the %s", tagc_human_time(packed->compute_s, text),
            all);
    else if (packed->link_s <= 0)
        say(out, "; whether the link is the limit is not known, because it was not measured");
    else if (2 * packed->link_s < packed->exposed_s)
        say(out,
            "; its bytes fill the link for only %s of the %s: messages or ranks wait for each other (where "
            "latency"
            " is high, try --bucket-elems and --grads-in-flight)",
            tagc_human_time(packed->link_s, text), all);
}

static void say_same_sharding(tagc_bench_advice *out, const tagc_bench_candidate *candidates, int n,
                              int n_rounds, int sharding, int plain) {
    int a = fastest(candidates, n, 0, sharding), b = fastest(candidates, n, 1, sharding);
    if (a < 0 || b < 0 || a == plain) return;
    tagc_result_spread gain = ratio_of(&candidates[a], &candidates[b], n_rounds);
    say(out, "; within %s, %s is %.2fx as fast as %s (%.2f to %.2f)", shardings[sharding], candidates[b].name,
        gain.median, candidates[a].name, gain.min, gain.max);
}

void tagc_bench_advise(const tagc_bench_candidate *candidates, int n, int n_rounds, tagc_result_spread again,
                       tagc_bench_advice *out) {
    int plain = fastest(candidates, n, 0, -1), packed = fastest(candidates, n, 1, -1);
    *out = (tagc_bench_advice){.arm = -1, .speedup = (double)NAN};
    if (!any_compresses(candidates, n)) {
        say(out, "no arm compresses, so there is nothing to recommend");
        return;
    }
    if (plain < 0) {
        say(out, "no arm leaves compression off, so there is nothing to compare with; add fsdp-bf16 or "
                 "zero2-bf16");
        return;
    }
    if (packed < 0) {
        say(out,
            "no arm sends fewer bytes than %s, the fastest without compression, so there is nothing to "
            "recommend",
            candidates[plain].name);
        return;
    }
    const tagc_bench_candidate *a = &candidates[plain], *b = &candidates[packed];
    tagc_result_spread gain = ratio_of(a, b, n_rounds);
    int is_unsteady;
    char with[24], without[24], range[128];
    tagc_human_time(b->total_s, with);
    tagc_human_time(a->total_s, without);
    int n_written = snprintf(range, sizeof range, "%.2f to %.2f in %d round%s", gain.min, gain.max, n_rounds,
                             n_rounds > 1 ? "s" : "");
    if (again.n > 0)
        snprintf(range + n_written, sizeof range - (size_t)n_written,
                 "; two turns of one arm are up to %.0f %% apart", 100 * noise_of(again));
    out->speedup = gain.median;
    out->verdict = judge(a, b, n_rounds, again, &is_unsteady);
    if (out->verdict == TAGC_VERDICT_PAYS) {
        out->arm = packed;
        say(out, "%s pays: %s an iteration, %.2fx as fast as %s, the fastest without compression (%s; %s)",
            b->name, with, gain.median, a->name, without, range);
    } else if (n_rounds < TAGC_BENCH_LEAST_ROUNDS) {
        say(out,
            "whether compression pays is not known, because fewer than %d rounds do not say by how much "
            "rounds "
            "differ (give --rounds %d): %s takes %s an iteration, %s %s without (%.2fx)",
            TAGC_BENCH_LEAST_ROUNDS, TAGC_BENCH_LEAST_ROUNDS, b->name, with, a->name, without, gain.median);
    } else {
        say(out,
            "leave compression off, %s %s%s: the best with it takes %s an iteration, %s %s without (%.2fx; "
            "%s)",
            b->name, tagc_verdict_name((int)out->verdict), is_unsteady ? "; rounds differ by more" : "", with,
            a->name, without, gain.median, range);
    }
    say_limit(out, a, b);
    if (a->sharding != b->sharding) say_same_sharding(out, candidates, n, n_rounds, b->sharding, plain);
    if (out->arm >= 0) say(out, "; this does not measure its cost in loss, only training does");
}
