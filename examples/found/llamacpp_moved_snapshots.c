/* A llama_decode whose batch has drafts of one sequence and single tokens of two others runs two ubatches. The second one
 * moves the first sequence's cell out of the way, with its state, without the snapshots that a rollback needs. What
 * llama_memory_seq_rm rolls back to then is not the sequence's. A model whose state can be rolled back (LFM2, Qwen3.5,
 * Granite-4-H, …) and that has 100 tokens or more:
 *
 *   cc llamacpp_moved_snapshots.c -I TREE/include -I TREE/ggml/include -L BIN -lllama -lm -Wl,-rpath,BIN
 *   ./a.out MODEL.gguf
 *
 * The exit code is 1 while the bug lives. */
#include "llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PROMPT = 20, DRAFTS = 3, DRAFTED = 3 };

static struct llama_context * make(struct llama_model * model) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_seq_max = 4;
    params.n_threads = params.n_threads_batch = 1;
    params.n_rs_seq = DRAFTS;
    return llama_init_from_model(model, params);
}

static void add(struct llama_batch * batch, int sequence, int position, int token) {
    int i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = position;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = sequence;
    batch->logits[i] = 1;
}

/* Decode a batch; return the likeliest token after its last one, and its logit. */
static int decode(struct llama_context * context, struct llama_batch batch, float * logit) {
    if (llama_decode(context, batch) != 0) {
        printf("llama_decode does not decode %d tokens\n", batch.n_tokens);
        exit(2);
    }
    const float * logits = llama_get_logits_ith(context, batch.n_tokens - 1);
    int num_words = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context))), best = 0;
    for (int i = 0; i < num_words; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    *logit = logits[best];
    llama_batch_free(batch);
    return best;
}

int main(int argc, char ** argv) {
    /* Sequences in the order in which they get their cells; the one with drafts lies between the two others. */
    const int order[] = {0, DRAFTED, 1};
    const char * names[] = {"decoded alone", "decoded before two others"};
    float logit, expected = 0;
    int wrong = 0;
    (void) argc;
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    for (int way = 0; way < 2; way++) {
        struct llama_context * context = make(model);
        for (int s = 0; s < 3; s++) {
            struct llama_batch prompt = llama_batch_init(PROMPT, 0, 1);
            for (int i = 0; i < PROMPT; i++) {
                add(&prompt, order[s], i, 5 + (3 * i + 7 * s) % 90);
            }
            decode(context, prompt, &logit);
        }
        struct llama_batch step = llama_batch_init(3 + DRAFTS, 0, 1);
        for (int i = 0; i < 1 + DRAFTS; i++) {
            add(&step, DRAFTED, PROMPT + i, 41 + i);
        }
        for (int other = 0; way == 1 && other < 2; other++) {
            add(&step, other, PROMPT, 30);
        }
        decode(context, step, &logit);
        if (!llama_memory_seq_rm(llama_get_memory(context), DRAFTED, PROMPT + 1, -1)) { /* all drafts are rejected */
            printf("this model's state cannot be rolled back\n");
            return 2;
        }
        struct llama_batch next = llama_batch_init(1, 0, 1);
        add(&next, DRAFTED, PROMPT + 1, 50);
        int token = decode(context, next, &logit);
        if (way == 0) {
            expected = logit;
        }
        printf("%-26s: token %d, logit %.4f\n", names[way], token, logit);
        wrong |= fabsf(logit - expected) > 0.01f;
    }
    return wrong;
}
