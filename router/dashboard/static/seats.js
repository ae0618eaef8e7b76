// The seats of an executor on a canvas: a seat for every place in the batch and the sequence on it; in detail as a bus
// seen from above, compact as a plain grid.
//
// Seats are as large as there is room for. Large ones show a head with the tenant's initials; small ones a shape; below
// that a seat is a cell of colour, so that thousands fit.

import { palette, tenantColour } from "./palette.js";
import { lookOf } from "./tenants.js";

const MAX_SEAT = 52;
const MIN_SEAT = 5;
const WITH_INITIALS = 22;
const WITH_HEAD = 13;
const CABIN = 46;
const TAIL = 14;
const WALL = 12;
const WHEEL = 7;
const DOORSTEP = 26;
const BOARD_MS = 280;
const LEAVE_MS = 260;

const COMPACT_MAX_SEAT = 24;
const COMPACT_HEIGHT = 72;

// Where seats are without the bus: in columns from the left, as large as there is room for.
export function compactLayoutOf(number, width) {
  for (let seat = COMPACT_MAX_SEAT; ; seat--) {
    const gap = seat >= WITH_HEAD ? 4 : seat > MIN_SEAT ? 2 : 1;
    const pitch = seat + gap;
    const most = Math.max(Math.floor((width - 4) / pitch), 1);
    const rows = Math.ceil(Math.max(number, 1) / most);
    const height = rows * pitch - gap + 6;
    if (height > COMPACT_HEIGHT && seat > MIN_SEAT) continue;
    const columns = Math.ceil(Math.max(number, 1) / rows);
    return { seat, pitch, across: pitch, rows, columns, aisle: 0, height, width, number, left: 2, top: 3, isCompact: true };
  }
}

// Where seats are, for so many in such a width: seats fill columns from the rear, the driver sits at the right.
export function layoutOf(number, width) {
  const inner = Math.max(width - CABIN - TAIL - 2, 60);
  const maxHeight = width < 480 ? 260 : 200;
  for (let seat = MAX_SEAT; ; seat--) {
    const gap = seat >= WITH_HEAD ? Math.max(3, Math.round(seat * 0.16)) : 1;
    const pitch = seat + gap;
    const most = Math.max(Math.floor(inner / pitch), 1);
    let rows = Math.ceil(Math.max(number, 1) / most);
    if (number > 1) rows += rows % 2;
    const aisle = rows > 1 ? Math.max(6, Math.round(seat * 0.5)) : 0;
    const height = rows * pitch - gap + aisle + 2 * WALL;
    if (height > maxHeight && seat > MIN_SEAT) continue;
    const columns = Math.ceil(Math.max(number, 1) / rows);
    const across = Math.min(inner / columns, pitch * 1.5);
    return { seat, pitch, across, rows, columns, aisle, height, width: TAIL + columns * across + CABIN, number, left: TAIL, top: WHEEL + WALL, isCompact: false };
  }
}

function placeOf(layout, number) {
  const [column, row] = [Math.floor(number / layout.rows), number % layout.rows];
  const aisle = row >= layout.rows / 2 ? layout.aisle : 0;
  const indent = layout.isCompact ? 0 : (layout.across - layout.seat) / 2;
  return { x: layout.left + column * layout.across + indent, y: layout.top + row * layout.pitch + aisle };
}

export class SeatsPicture {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.layout = null;
    this.riders = new Map();
    this.leaving = [];
    this.standing = [];
    this.selected = null;
    this.isCompact = false;
  }

  // Takes in who sits where now; `animate`: whether boarding and leaving may be seen as movements.
  show(bus, animate, now) {
    this.number = bus.seats();
    this.standing = bus.standing();
    const riders = new Map();
    for (const one of bus.seated()) {
      const before = this.riders.get(one.seat);
      const stays = before !== undefined && isSame(before.one, one);
      if (before !== undefined && !stays && animate) this.leaving.push({ ...before, since: now });
      // Who takes a seat just left comes when the other is gone.
      const since = before === undefined ? now : now + LEAVE_MS / 2;
      riders.set(one.seat, { one, since: stays ? before.since : animate ? since : -BOARD_MS });
    }
    for (const [seat, rider] of this.riders) {
      if (!riders.has(seat) && animate) this.leaving.push({ ...rider, since: now });
    }
    this.riders = riders;
  }

  // Whether a sequence is still on the move.
  isMoving(now) {
    this.leaving = this.leaving.filter((rider) => now - rider.since < LEAVE_MS);
    return this.leaving.length > 0 || [...this.riders.values()].some((rider) => now - rider.since < BOARD_MS);
  }

  seatAt(x, y) {
    if (this.layout === null) return null;
    const { across, rows, columns, pitch, aisle, left, top } = this.layout;
    const column = Math.floor((x - left) / across);
    const fromTop = y - top;
    const row = Math.floor((fromTop >= (rows / 2) * pitch + aisle / 2 ? fromTop - aisle : fromTop) / pitch);
    const seat = column * rows + row;
    return column >= 0 && column < columns && row >= 0 && row < rows && seat < this.number ? seat : null;
  }

  draw(now) {
    const width = this.canvas.clientWidth;
    if (width === 0) return;
    if (this.layout?.number !== this.number || this.drawnWidth !== width || this.layout.isCompact !== this.isCompact) {
      this.layout = this.isCompact ? compactLayoutOf(this.number, width) : layoutOf(this.number, width);
      this.drawnWidth = width;
    }
    fit(this.canvas, this.context, width, this.layout.height + (this.isCompact ? 0 : 2 * WHEEL + DOORSTEP));
    if (!this.isCompact) this.drawBody();
    for (let seat = 0; seat < this.number; seat++) this.drawSeat(seat);
    for (const rider of this.leaving) this.drawRider(rider, 1 - (now - rider.since) / LEAVE_MS, true);
    for (const rider of this.riders.values()) this.drawRider(rider, Math.min((now - rider.since) / BOARD_MS, 1), false);
    if (!this.isCompact) this.drawStanding();
    this.drawSelected();
  }

  drawBody() {
    const { context, layout } = this;
    const colours = palette();
    const [right, bottom] = [layout.width, WHEEL + layout.height];
    context.fillStyle = colours.tyre;
    for (const x of [TAIL + 18, right - CABIN - 44]) {
      rounded(context, x, 0, 34, layout.height + 2 * WHEEL, 5);
      context.fill();
    }
    context.fillStyle = colours.bus;
    context.strokeStyle = colours["bus-edge"];
    context.lineWidth = 1.5;
    rounded(context, 1, WHEEL, right - 2, layout.height, [8, 22, 22, 8]);
    context.fill();
    context.stroke();
    context.fillStyle = colours["bus-floor"];
    rounded(context, 6, WHEEL + 5, right - 20, layout.height - 10, [5, 12, 12, 5]);
    context.fill();
    context.fillStyle = colours.glass;
    rounded(context, right - 12, WHEEL + 12, 7, layout.height - 24, 4);
    context.fill();
    this.drawCabin(right, bottom, colours);
  }

  drawCabin(right, bottom, colours) {
    const { context } = this;
    context.strokeStyle = colours.edge;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(right - 28, WHEEL + 22, 8, 0, 2 * Math.PI);
    context.moveTo(right - 28, WHEEL + 14);
    context.lineTo(right - 28, WHEEL + 30);
    context.stroke();
    // The doors: on at the front, off at the rear.
    context.fillStyle = colours.glass;
    rounded(context, right - 40, bottom - 6, 24, 7, 2);
    context.fill();
  }

  drawSeat(seat) {
    const { context, layout } = this;
    const { x, y } = placeOf(layout, seat);
    const colours = palette();
    context.fillStyle = colours.seat;
    context.strokeStyle = colours["seat-edge"];
    context.lineWidth = 1;
    if (layout.seat < WITH_HEAD) {
      context.fillRect(x, y, layout.seat, layout.seat);
      if (layout.seat > 4) context.strokeRect(x + 0.5, y + 0.5, layout.seat - 1, layout.seat - 1);
      return;
    }
    rounded(context, x, y, layout.seat, layout.seat, layout.seat * 0.22);
    context.fill();
    context.stroke();
    if (layout.isCompact) return;
    context.fillStyle = colours["seat-edge"];
    rounded(context, x, y + layout.seat * 0.14, Math.max(2, layout.seat * 0.09), layout.seat * 0.72, layout.seat * 0.04);
    context.fill();
  }

  drawRider({ one }, shown, isLeaving) {
    const { context, layout } = this;
    if (one.seat >= this.number) return;
    const { x, y } = placeOf(layout, one.seat);
    const [look, size] = [lookOf(one.tenant), layout.seat];
    const colour = tenantColour(look);
    context.save();
    context.globalAlpha = Math.max(0, shown);
    if (size < WITH_HEAD) {
      context.fillStyle = colour;
      // In prefill: its lower half.
      const height = isReading(one) ? Math.ceil(size / 2) : size;
      context.fillRect(x, y + size - height, size, height);
    } else {
      if (!isLeaving) this.drawFill(one, x, y, size, colour);
      const rise = (1 - Math.max(shown, 0)) * size * (isLeaving ? -0.5 : 0.35);
      drawHead(context, x + size / 2, y + size / 2 + rise, size * 0.34, look, isReading(one));
    }
    context.restore();
  }

  // How far it is: of its prompt while that is read, then of the output that it may have at most.
  drawFill(one, x, y, size, colour) {
    const { context } = this;
    const share = progressOf(one, this.blockSize ?? 16);
    context.save();
    rounded(context, x + 0.5, y + 0.5, size - 1, size - 1, size * 0.22);
    context.clip();
    const height = Math.max(share * size, 2);
    context.globalAlpha *= isReading(one) ? 0.22 : 0.34;
    context.fillStyle = colour;
    context.fillRect(x, y + size - height, size, height);
    if (isReading(one)) {
      context.globalAlpha *= 2.5;
      context.strokeStyle = colour;
      context.lineWidth = 1.5;
      context.beginPath();
      context.rect(x, y + size - height, size, height);
      context.clip();
      context.beginPath();
      for (let at = -size; at < size; at += 6) {
        context.moveTo(x + at, y + size);
        context.lineTo(x + at + size, y);
      }
      context.stroke();
    }
    context.restore();
  }

  // Who has been accepted and has no seat stands at the front door.
  drawStanding() {
    const { context, layout } = this;
    const most = Math.max(Math.floor((layout.width - 60) / 20), 1);
    const y = layout.height + 2 * WHEEL + DOORSTEP / 2;
    this.standing.slice(0, most).forEach((one, at) => {
      drawHead(context, layout.width - 28 - at * 20, y, 8, lookOf(one.tenant), true);
    });
    if (this.standing.length > most) {
      context.fillStyle = palette().soft;
      context.font = "12px sans-serif";
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(`+${this.standing.length - most}`, layout.width - 36 - (most - 1) * 20 - 4, y);
    }
  }

  drawSelected() {
    if (this.selected === null || this.selected >= this.number) return;
    const { x, y } = placeOf(this.layout, this.selected);
    const { context } = this;
    context.strokeStyle = palette().ink;
    context.lineWidth = 2.5;
    rounded(context, x - 2.5, y - 2.5, this.layout.seat + 5, this.layout.seat + 5, this.layout.seat * 0.26);
    context.stroke();
  }
}

const isSame = (a, b) => a.id === b.id && a.choice === b.choice && a.tenant === b.tenant && a.prompt === b.prompt;
const isReading = (one) => one.phase !== "SEQUENCE_PHASE_DECODE";

export function progressOf(one, blockSize) {
  if (isReading(one)) return Math.min(one.computed / Math.max(one.prompt, 1), 1);
  return Math.min(one.output / Math.max(one.reserved * blockSize - one.prompt, one.output, 1), 1);
}

// A head with initials, hollow while its prompt is read; too small for letters, a shape.
function drawHead(context, x, y, radius, look, isHollow) {
  const colour = tenantColour(look);
  const hasInitials = radius >= WITH_INITIALS * 0.34;
  context.beginPath();
  if (hasInitials || look.pattern === 0) context.arc(x, y, radius, 0, 2 * Math.PI);
  else corners(context, x, y, radius, look.pattern + 2);
  context.fillStyle = isHollow ? palette().card : colour;
  context.fill();
  context.strokeStyle = colour;
  context.lineWidth = Math.max(1.5, radius * 0.16);
  if (isHollow) context.stroke();
  if (!hasInitials) return;
  context.fillStyle = isHollow ? colour : palette()["on-tenant"];
  context.font = `700 ${Math.round(radius * 0.92)}px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(look.initials, x, y + radius * 0.06);
}

function corners(context, x, y, radius, number) {
  for (let at = 0; at < number; at++) {
    const angle = (2 * Math.PI * at) / number - Math.PI / 2;
    context.lineTo(x + radius * 1.15 * Math.cos(angle), y + radius * 1.15 * Math.sin(angle));
  }
  context.closePath();
}

function rounded(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, Math.max(width, 0), Math.max(height, 0), radius);
}

// Gives a canvas its size on the screen's own pixels and clears it.
export function fit(canvas, context, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.height = `${height}px`;
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
}
