// How the board says things: numbers with their units, and what the protocol's names mean.

const CONSTRAINTS = {
  STEP_CONSTRAINT_NO_WORK: "nobody was left to board",
  STEP_CONSTRAINT_SEATS: "every seat was taken",
  STEP_CONSTRAINT_BLOCKS: "no block was left for who waits",
  STEP_CONSTRAINT_TOKENS: "the step's token budget was spent",
  STEP_CONSTRAINT_PACE: "prompts were cut short to keep the time between tokens",
  STEP_CONSTRAINT_STATIC_BATCH: "a static batch was still running",
  STEP_CONSTRAINT_TWIN: "who waits wants the prefix that another is computing",
};
const PHASES = {
  SEQUENCE_PHASE_STANDBY: "waits for a seat",
  SEQUENCE_PHASE_PREFILL: "prefill",
  SEQUENCE_PHASE_DECODE: "decode",
  SEQUENCE_PHASE_PREEMPTED: "gave up its seat",
};
const CLASSES = {
  PRIORITY_CLASS_INTERACTIVE: "interactive",
  PRIORITY_CLASS_STANDARD: "standard",
  PRIORITY_CLASS_BATCH: "batch",
};

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const constraintWords = (name) => CONSTRAINTS[name] ?? "not known";
export const phaseWords = (name) => PHASES[name] ?? "not known";
export const classWords = (name) => CLASSES[name] ?? "standard";
export const tenantWords = (tenant) => tenant || "other tenants";

export function count(value) {
  return whole.format(Math.round(value ?? 0));
}

// Three figures that matter: 0.42, 4.2, 42, 420.
export function figure(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 100 ? whole.format(value) : value.toFixed(size >= 10 ? 1 : 2);
}

export function percent(share) {
  const value = 100 * share;
  return value > 0 && value < 1 ? "< 1 %" : `${Math.round(value)} %`;
}

// A duration in the unit that suits it, as [number, unit].
export function duration(ms) {
  if (ms === undefined || ms === null) return ["–", ""];
  if (ms < 1000) return [figure(ms), "ms"];
  if (ms < 120_000) return [figure(ms / 1000), "s"];
  return [whole.format(ms / 60_000), "min"];
}

export function durationText(ms) {
  return duration(ms).join(" ").trim();
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
