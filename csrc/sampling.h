// Arguments of accept and markov_sample: what every device checks of them without reading their values.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "checks.h"

namespace carryover {

// Returns the temperature that the kernels work with: 0 is greedy, and nothing above 0 is too small or too
// large to invert in float32.
inline double check_temperature(const Checker& check, double temperature) {
  check.require(temperature >= 0 && std::isfinite(temperature),
                "temperature must be 0 (greedy) or a finite number above 0, got ", temperature);
  return temperature > 0 ? std::clamp(temperature, 1e-30, 1e30) : 0;
}

// Needed at temperatures above 0; `layout` is [batch, columns] in words, `instead` what could be given, too.
inline void check_uniforms(const Checker& check, const std::optional<Tensor>& uniforms, double temperature,
                           int64_t batch, int64_t columns, const char* layout, const char* instead = "") {
  check.require(uniforms.has_value(), "uniforms is None at temperature ", temperature,
                "; give float32 numbers in [0, 1) of shape ", layout, ", e.g. torch.rand(", batch, ", ",
                columns, ")", instead);
  check.dtype(*uniforms, "uniforms", ScalarType::Float);
  check.shape(*uniforms, "uniforms", {batch, columns}, layout);
  check.contiguous(*uniforms, "uniforms");
}

struct AcceptArguments {
  const Tensor &draft_tokens, &target_logits;
  const std::optional<Tensor>&draft_probs, &uniforms;
  double temperature;
  int64_t batch = 0, drafts = 0, vocab = 0;

  void check(const Checker& c) {
    c.dtype(draft_tokens, "draft_tokens", ScalarType::Long);
    c.rank(draft_tokens, "draft_tokens", 2, "[B, K]");
    c.contiguous(draft_tokens, "draft_tokens");
    batch = draft_tokens.size(0), drafts = draft_tokens.size(1);
    c.floating(target_logits, "target_logits", /*float32_on_gpu=*/true);
    c.shape(target_logits, "target_logits", {batch, drafts + 1, -1}, "[B, K + 1, V]");
    c.dense_rows(target_logits, "target_logits");
    vocab = target_logits.size(2);
    c.require(vocab >= 1, "target_logits must have a vocabulary, got shape ", shape_text(target_logits));
    const double given = temperature;
    temperature = check_temperature(c, given);
    if (temperature == 0) return;
    check_uniforms(c, uniforms, given, batch, drafts + 1, "[B, K + 1]");
    if (!draft_probs) return;
    c.dtype(*draft_probs, "draft_probs", ScalarType::Float);
    c.shape(*draft_probs, "draft_probs", {batch, drafts, vocab}, "[B, K, V]");
    c.dense_rows(*draft_probs, "draft_probs");
  }
};

struct MarkovArguments {
  const Tensor &base_logits, &prev_tokens, &markov_w1, &markov_w2;
  const std::optional<Tensor>&d2t, &uniforms, &seeds, &offsets;
  double temperature;
  int64_t batch = 0, steps = 0, vocab = 0, tokens = 0, rank = 0;  // tokens: rows of markov_w1

  void check(const Checker& c) {
    c.floating(base_logits, "base_logits");
    c.rank(base_logits, "base_logits", 3, "[B, K, Vd]");
    c.dense_rows(base_logits, "base_logits");
    batch = base_logits.size(0), steps = base_logits.size(1), vocab = base_logits.size(2);
    c.require(vocab >= 1, "base_logits must have a vocabulary, got shape ", shape_text(base_logits));
    c.dtype(prev_tokens, "prev_tokens", ScalarType::Long);
    c.shape(prev_tokens, "prev_tokens", {batch}, "[B]");
    c.contiguous(prev_tokens, "prev_tokens");
    c.same_dtype(markov_w1, "markov_w1", base_logits, "base_logits");
    c.rank(markov_w1, "markov_w1", 2, "[V, r]");
    c.contiguous(markov_w1, "markov_w1");
    tokens = markov_w1.size(0), rank = markov_w1.size(1);
    c.require(tokens >= 1 && rank >= 1, "markov_w1 must have rows and a rank, got shape ",
              shape_text(markov_w1));
    c.same_dtype(markov_w2, "markov_w2", base_logits, "base_logits");
    c.shape(markov_w2, "markov_w2", {vocab, rank}, "[Vd, r]");
    c.contiguous(markov_w2, "markov_w2");
    const double given = temperature;
    temperature = check_temperature(c, given);
    if (d2t) {
      c.dtype(*d2t, "d2t", ScalarType::Long);
      c.shape(*d2t, "d2t", {vocab}, "[Vd]");
      c.contiguous(*d2t, "d2t");
    } else {
      c.require(vocab <= tokens, "base_logits has ", vocab, " columns and markov_w1 only ", tokens,
                " rows; give d2t, the token of each column");
    }
    if (temperature > 0) check_randomness(c, given);
  }

 private:
  // Numbers of the caller, or of a stream for each request.
  void check_randomness(const Checker& c, double given) const {
    if (!seeds) {
      c.require(!offsets, "offsets are given without seeds; give both, or uniforms");
      check_uniforms(c, uniforms, given, batch, steps, "[B, K]", " or seeds");
      return;
    }
    c.require(!uniforms, "uniforms and seeds are both given; give one of them");
    c.dtype(*seeds, "seeds", ScalarType::Long);
    c.shape(*seeds, "seeds", {batch}, "[B]");
    c.contiguous(*seeds, "seeds");
    if (!offsets) return;
    c.dtype(*offsets, "offsets", ScalarType::Long);
    c.shape(*offsets, "offsets", {batch}, "[B]");
    c.contiguous(*offsets, "offsets");
  }
};

}  // namespace carryover
