/* What of llama.h takes structures, whose fields change from release to release, with plain arguments instead. */
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct engine {
    struct llama_model * model;
    struct llama_context * context;
    int32_t num_words;
};

static void say_errors(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

/* An engine; NULL if the model is not loaded. */
void * hk_open(const char * path, int32_t longest, int32_t num_sequences, int32_t chunk, int32_t num_snapshots, int32_t unified) {
    llama_log_set(say_errors, NULL);
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == NULL) {
        return NULL;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = longest * num_sequences;
    params.n_batch = longest;
    params.n_ubatch = chunk;
    params.n_seq_max = num_sequences;
    params.n_rs_seq = num_snapshots;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.kv_unified = unified;
    struct llama_context * context = llama_init_from_model(model, params);
    if (context == NULL) {
        llama_model_free(model);
        return NULL;
    }
    struct engine * engine = malloc(sizeof(struct engine));
    engine->model = model;
    engine->context = context;
    engine->num_words = llama_vocab_n_tokens(llama_model_get_vocab(model));
    return engine;
}

int32_t hk_num_words(struct engine * engine) {
    return engine->num_words;
}

void * hk_context(struct engine * engine) {
    return engine->context;
}

void * hk_memory(struct engine * engine) {
    return llama_get_memory(engine->context);
}

/* Decode a batch; `rows` gets the logits behind each token that is wanted, [wanted, num_words]. Returns llama_decode's. */
int32_t hk_decode(struct engine * engine, int32_t n, const int32_t * tokens, const int32_t * positions,
                  const int32_t * sequences, const int8_t * wanted, float * rows) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = positions[i];
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequences[i];
        batch.logits[i] = wanted[i];
    }
    int32_t status = llama_decode(engine->context, batch);
    for (int32_t i = 0; i < n && status == 0; i++) {
        if (wanted[i]) {
            memcpy(rows, llama_get_logits_ith(engine->context, i), engine->num_words * sizeof(float));
            rows += engine->num_words;
        }
    }
    llama_batch_free(batch);
    return status;
}
