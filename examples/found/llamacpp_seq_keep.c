/* llama_memory_seq_keep leaves the attention tokens of other sequences where each has a buffer of its own, as by default:
 * what a sequence decodes next also attends to what it held before. Any model with attention, 100 tokens or more:
 *
 *   cc llamacpp_seq_keep.c -I TREE/include -I TREE/ggml/include -L BIN -lllama -Wl,-rpath,BIN && ./a.out MODEL.gguf
 *
 * The exit code is 1 while the bug lives. */
#include "llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static struct llama_context * make(struct llama_model * model) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_seq_max = 2;
    params.n_threads = params.n_threads_batch = 1;
    return llama_init_from_model(model, params);
}

/* The likeliest token behind some tokens of a sequence, and its logit. */
static int decode(struct llama_context * context, int sequence, const int * tokens, int n, float * logit) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = i == n - 1;
    }
    batch.n_tokens = n;
    if (llama_decode(context, batch) != 0) {
        printf("llama_decode does not decode %d tokens of sequence %d\n", n, sequence);
        exit(1);
    }
    const float * logits = llama_get_logits_ith(context, n - 1);
    int num_words = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context))), best = 0;
    for (int i = 0; i < num_words; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    *logit = logits[best];
    llama_batch_free(batch);
    return best;
}

int main(int argc, char ** argv) {
    int old[] = {11, 12, 13, 14, 15, 16}, other[] = {21, 22}, now[] = {31, 32, 33};
    float kept, fresh;
    (void) argc;
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context * context = make(model);
    decode(context, 0, old, 6, &kept);
    decode(context, 1, other, 2, &kept);
    llama_memory_seq_keep(llama_get_memory(context), 1);
    int after = decode(context, 0, now, 3, &kept), alone = decode(make(model), 0, now, 3, &fresh);
    printf("behind seq_keep(1), sequence 0: token %d, logit %.4f\n", after, kept);
    printf("in a new context              : token %d, logit %.4f\n", alone, fresh);
    return after != alone || fabsf(kept - fresh) > 0.01f;
}
