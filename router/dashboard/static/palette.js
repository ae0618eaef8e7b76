// The theme's colours as a canvas needs them. The style sheet has them as variables that only an element resolves.

import { NUM_COLOURS } from "./tenants.js";

const NAMES = [
  "card", "ink", "soft", "line", "edge", "track", "accent", "bus", "bus-floor", "bus-edge", "glass", "tyre", "seat",
  "seat-edge", "on-tenant", "t-other", "p50", "p99",
  ...Array.from({ length: NUM_COLOURS }, (_, number) => `t${number}`),
];

let colours = null;

// Colours by name, resolved once for each theme.
export function palette() {
  if (colours === null) {
    const probe = document.createElement("i");
    document.body.append(probe);
    colours = Object.fromEntries(
      NAMES.map((name) => {
        probe.style.color = `var(--${name})`;
        return [name, getComputedStyle(probe).color];
      }),
    );
    probe.remove();
  }
  return colours;
}

export function tenantColour(look) {
  return palette()[look.colour === "other" ? "t-other" : `t${look.colour}`];
}

// To be called when the theme has changed.
export function forgetPalette() {
  colours = null;
}
