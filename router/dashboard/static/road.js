// The steps as they pass, on a canvas: a bar for each, as high as it had tokens; of output solid, of prompts hatched.

import { palette } from "./palette.js";
import { fit } from "./seats.js";

const PITCH = 5;
const BAR = 4;
const HEIGHT = 48;
// Steps come in bundles, some every message; they pass one by one until the next bundle is due.
const MAX_SPREAD_MS = 600;
const MAX_KEPT = 1000;

export class RoadPicture {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.passed = [];
    this.coming = [];
    this.lastMs = 0;
  }

  // Takes in steps; `animate`: whether they pass one by one.
  add(steps, animate, now) {
    const spread = Math.min(now - this.lastMs, MAX_SPREAD_MS);
    this.lastMs = now;
    this.passed = [...this.passed, ...this.coming.map((one) => one.step)].slice(-MAX_KEPT);
    this.coming = steps.map((step, at) => ({ step, dueMs: animate ? now + (spread * at) / steps.length : 0 }));
  }

  isMoving() {
    return this.coming.length > 0;
  }

  draw(now) {
    const width = this.canvas.clientWidth;
    if (width === 0) return;
    while (this.coming.length > 0 && this.coming[0].dueMs <= now) this.passed.push(this.coming.shift().step);
    const most = Math.ceil(width / PITCH);
    this.passed = this.passed.slice(-most);
    fit(this.canvas, this.context, width, HEIGHT);
    const top = Math.max(...this.passed.map((step) => step.output + step.prompt), 1);
    this.passed.forEach((step, at) => {
      this.drawStep(step, width - (this.passed.length - at) * PITCH, (HEIGHT - 2) / Math.sqrt(top));
    });
    this.context.fillStyle = palette().edge;
    this.context.fillRect(0, HEIGHT - 1, width, 1);
  }

  // Heights by the square root: one prompt of a thousand tokens must not flatten all decoding.
  drawStep(step, x, scale) {
    const { context } = this;
    const whole = Math.sqrt(step.output + step.prompt) * scale;
    const output = whole * (step.output / Math.max(step.output + step.prompt, 1));
    const bottom = HEIGHT - 1;
    context.fillStyle = palette().p50;
    context.fillRect(x, bottom - output, BAR, output);
    context.fillStyle = palette().p99;
    for (let y = bottom - output - 2; y >= bottom - whole; y -= 3) context.fillRect(x, y, BAR, 2);
  }
}
