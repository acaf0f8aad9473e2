/* llama_memory_seq_rm of the last tokens leaves a recurrent state to be rolled back by the next llama_decode (n_rs_seq > 0).
 * Until then llama_memory_seq_cp copies the state that is not rolled back. A model whose state can be rolled back
 * (LFM2, Qwen3.5, Granite-4-H, …) and that has 100 tokens or more:
 *
 *   cc llamacpp_pending_rollback.c -I TREE/include -I TREE/ggml/include -L BIN -lllama -lm -Wl,-rpath,BIN
 *   ./a.out MODEL.gguf
 *
 * The exit code is 1 while the bug lives. */
#include "llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROMPT = 20, DRAFTS = 3 };

static struct llama_context * make(struct llama_model * model) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_seq_max = 2;
    params.n_threads = params.n_threads_batch = 1;
    params.n_rs_seq = DRAFTS;
    params.kv_unified = true;
    return llama_init_from_model(model, params);
}

/* The likeliest token behind some tokens of a sequence, and its logit. */
static int decode(struct llama_context * context, int sequence, int position, const int * tokens, int n, float * logit) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = position + i;
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
    int prompt[PROMPT], drafts[1 + DRAFTS] = {41, 42, 43, 44}, next[] = {50};
    float logit, expected;
    int wrong = 0;
    (void) argc;
    for (int i = 0; i < PROMPT; i++) {
        prompt[i] = 5 + 3 * i;
    }
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    const char * names[] = {"in the sequence itself", "in a copy (seq_cp)", "from saved data", "from its own saved data"};
    for (int way = 0; way < 4; way++) {
        struct llama_context * context = make(model);
        llama_memory_t memory = llama_get_memory(context);
        decode(context, 0, 0, prompt, PROMPT, &logit);
        decode(context, 0, PROMPT, drafts, 1 + DRAFTS, &logit);
        if (!llama_memory_seq_rm(memory, 0, PROMPT + 2, -1)) { /* two drafts are rejected */
            printf("this model's state cannot be rolled back\n");
            return 2;
        }
        int sequence = way == 1 || way == 2;
        if (way == 1) {
            llama_memory_seq_cp(memory, 0, 1, -1, -1);
        }
        if (way >= 2) {
            size_t size = llama_state_seq_get_size(context, 0);
            unsigned char * data = malloc(size);
            llama_state_seq_get_data(context, data, size, 0);
            llama_memory_seq_rm(memory, 0, -1, -1);
            llama_state_seq_set_data(context, data, size, sequence);
        }
        int token = decode(context, sequence, PROMPT + 2, next, 1, &logit);
        if (way == 0) {
            expected = logit;
        }
        printf("%-24s: token %d, logit %.4f\n", names[way], token, logit);
        wrong |= fabsf(logit - expected) > 0.01f;
    }
    return wrong;
}
