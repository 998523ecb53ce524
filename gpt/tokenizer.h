// The byte tokenizer: 256 tokens for the 256 bytes and one for the end of a text. Any file can be encoded, in any
// encoding, and every sequence of tokens decodes.
#ifndef GPT_TOKENIZER_H
#define GPT_TOKENIZER_H

#include "json.h"

enum { TOKEN_END_OF_TEXT = 256, BYTE_VOCAB = 257 };

// Writes the bytes that `token` stands for; the end of a text is shown as a newline.
static inline void token_write(FILE *file, int token) { fputc(token == TOKEN_END_OF_TEXT ? '\n' : token, file); }

// Writes the tokenizer in Hugging Face's tokenizer.json format: a BPE without merges over byte-level characters.
// GPT-2 shows a byte as a printable character: printable bytes of Latin-1 as themselves, the 68 others, in order,
// as U+0100 and on (the function bytes_to_unicode in OpenAI's encoder.py).
static inline void tokenizer_write_json(FILE *file) {
    fputs("{\"version\": \"1.0\", \"truncation\": null, \"padding\": null,\n"
          " \"added_tokens\": [{\"id\": 256, \"content\": \"<|endoftext|>\", \"single_word\": false, \"lstrip\": false,"
          " \"rstrip\": false, \"normalized\": false, \"special\": true}],\n"
          " \"normalizer\": null,\n"
          " \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": false},\n"
          " \"post_processor\": null,\n"
          " \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": true},\n"
          " \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": null,"
          " \"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false,\n  \"vocab\": {", file);
    uint32_t next = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        char text[8] = {0};
        json_put_utf8(text, printable ? (uint32_t)byte : next++);
        json_write_string(file, text);
        fprintf(file, ": %d, ", byte);
    }
    fputs("\"<|endoftext|>\": 256},\n  \"merges\": []}}\n", file);
}

#endif
