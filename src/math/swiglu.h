// SwiGLU with an optional clamp, forward and backward, for one element. The formulas are those of LayerShape; h is
// always formed from the rounded g and u, so that saved and recomputed values agree bit for bit. A clamp that is off is
// infinity.
#pragma once

#include <cmath>

#include "moewave/bf16.h"

namespace moewave::math {

/// Rounds to BF16 and stays on the side of `bound` (> 0) on which `value` lies: result > bound exactly if value >
/// bound. So backward, which sees only the rounded value, knows whether forward clamped.
MOEWAVE_HD inline Bf16 round_keeping_side(float value, float bound) {
  Bf16 rounded = to_bf16(value);
  const bool is_above = to_float(rounded) > bound;
  if (value > bound && !is_above) ++rounded.bits;
  if (value <= bound && is_above) --rounded.bits;
  return rounded;
}

MOEWAVE_HD inline Bf16 round_gate(float gate, float clamp) { return round_keeping_side(gate, clamp); }

MOEWAVE_HD inline Bf16 round_linear(float up, float clamp) {
  if (!(up < 0.0f)) return round_keeping_side(up, clamp);
  Bf16 mirrored = round_keeping_side(-up, clamp);
  mirrored.bits ^= 0x8000u;
  return mirrored;
}

// Comparisons are written so that NaN passes through.
MOEWAVE_HD inline float clamp_gate(float gate, float clamp) { return gate > clamp ? clamp : gate; }
MOEWAVE_HD inline float clamp_linear(float up, float clamp) { return up > clamp ? clamp : (up < -clamp ? -clamp : up); }

MOEWAVE_HD inline float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

MOEWAVE_HD inline Bf16 swiglu(Bf16 gate, Bf16 up, float clamp) {
  const float g = clamp_gate(to_float(gate), clamp);
  const float u = clamp_linear(to_float(up), clamp);
  return to_bf16(g * sigmoid(g) * u);
}

struct SwigluGradient {
  float gate;
  float up;
};

/// Gradients of g and u for the gradient `dh` of h (already times the router weight).
MOEWAVE_HD inline SwigluGradient swiglu_backward(Bf16 gate, Bf16 up, float dh, float clamp) {
  const float raw_gate = to_float(gate);
  const float raw_up = to_float(up);
  const float g = clamp_gate(raw_gate, clamp);
  const float u = clamp_linear(raw_up, clamp);
  const float s = sigmoid(g);
  const bool gate_clamped = raw_gate > clamp;
  const bool up_clamped = raw_up > clamp || raw_up < -clamp;
  return {gate_clamped ? 0.0f : dh * u * (s * (1.0f + g * (1.0f - s))), up_clamped ? 0.0f : dh * (g * s)};
}

}  // namespace moewave::math
