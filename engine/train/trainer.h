/* Everything one rank of a training run holds, from its options to its place in the data. */
#ifndef TAGC_TRAIN_TRAINER_H
#define TAGC_TRAIN_TRAINER_H

#include "train/engine.h"
#include "train/metrics.h"
#include "train/progress.h"
#include "train/saved.h"

/* How a run begins: with these options, and from a checkpoint or none. The command makes it out of its words. */
typedef struct tagc_beginning {
    tagc_train_options
        options; /* resolved, a resumed checkpoint's merged in; texts live in `saved`, or longer than the run */
    json_t *texts;    /* {name: text} of all options: what checkpoints and metrics say of them */
    tagc_saved saved; /* of the checkpoint; without one, best_val_loss is infinite */
    char checkpoint[TAGC_PATH_BYTES];
    uint64_t step;  /* of the checkpoint */
    int is_unsaved; /* 1: --resume of a run that ended before its first checkpoint; options.resume is NULL */
    int is_data_given; /* 1: the text may be another than the checkpoint's */
    tagc_progress progress;
} tagc_beginning;

/* Of what no trainer has taken over. */
void tagc_beginning_close(tagc_beginning *from);

typedef struct tagc_trainer {
    tagc_rank *rank;
    tagc_train_options options;
    json_t *texts;          /* as in tagc_beginning */
    tagc_saved saved;       /* what the next checkpoint will say */
    tagc_progress progress; /* quiet on all ranks but 0 */
    tagc_metrics *metrics;  /* rank 0 with --out only */
    tagc_tokens *train_tokens, *val_tokens;
    tagc_loader *loader;
    tagc_evaluation evaluation; /* its loader NULL: no validation */
    tagc_training training;
    uint64_t step; /* done so far */
    /* Steps of this process; skipped: the gradient was not finite. */
    uint64_t n_done, n_skipped, n_skipped_in_row;
    uint64_t trace_first, trace_last;
    int n_below; /* flats below their last level at the last step */
} tagc_trainer;

/* Before MPI starts: opens what tagc_trainer_open would open first (data, model, --out) and closes it again. So an error that
 * every rank finds ends each rank by itself, without MPI_Abort. Makes no files. */
tagc_status tagc_trainer_rehearse(tagc_rank *rank, tagc_beginning *from, tagc_gpt2_config *model);

/* Collective. *out can be closed after success and failure alike. */
tagc_status tagc_trainer_open(tagc_rank *rank, tagc_beginning *from, tagc_trainer *out);
void tagc_trainer_close(tagc_trainer *trainer);

/* Local: `status`, whose text says what to do if a token was read that the model does not know. */
tagc_status tagc_trainer_with_remedy(const tagc_trainer *trainer, tagc_status status);

/* Collective: the steps that are left, with validation, checkpoints and metrics between them. */
tagc_status tagc_trainer_run(tagc_trainer *trainer);

/* Collective: a checkpoint of this step in --out; nothing without --out. */
tagc_status tagc_trainer_save(tagc_trainer *trainer);

/* ---- the folder of --out ---- */

/* Local, of rank 0: refuses a folder whose run would get mixed up with this one. checkpoint: the one that is
 * gone on from, of `step`; NULL for a new run. is_unsaved: as in tagc_beginning. */
tagc_status tagc_run_folder_check(const char *dir, const char *checkpoint, uint64_t step, int is_unsaved);

/* Collective. *out: 1 if the folder holds metrics and no checkpoint; refuses those of a fork. Rank 0's folder counts. */
tagc_status tagc_run_folder_unsaved(tagc_comm *comm, const char *dir, int *out);

/* Local: `status`, whose text names an older checkpoint if the newest one of --out is damaged. */
tagc_status tagc_run_folder_remedy(const tagc_train_options *options, tagc_status status);

/* Collective, after rank 0 has made it: refuses when a rank does not see the folder. */
tagc_status tagc_run_folder_agree(tagc_comm *comm, const char *dir);

#endif
