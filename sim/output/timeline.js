"use strict";
for (const box of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const canvas = box.querySelector("canvas"), tip = box.querySelector(".tip"), paint = canvas.getContext("2d");
  const INK = "#1b1f24", SOFT = "#59636e", GRID = "#e4e8ec";
  const AXIS = 22, NAME = 18, BAR = data.lanes[0].rows.length > 1 ? 15 : 22, GAP = 8, TIER = 84, SHORTEST_NS = 100;
  const whole = Math.max(1, ...data.length_ns);
  const single = data.length_ns.length === 1;
  let view = [0, whole], chosen = null, drag = null;

  /* ---- words ---- */

  const digits = (x) => String(Number(x.toPrecision(3)));
  function time(ns) {
    const [scale, unit] = Math.abs(ns) >= 999.5e6 ? [1e9, "s"] : Math.abs(ns) >= 999500 ? [1e6, "ms"]
      : Math.abs(ns) >= 999.5 ? [1e3, "µs"] : [1, "ns"];
    return digits(ns / scale) + " " + unit;
  }
  function exact(ns) {
    return (ns / 1e9).toFixed(whole < 1e7 ? 9 : whole < 1e10 ? 6 : 4) + " s";
  }
  function size(bytes) {
    const k = [4, 3, 2, 1].find((k) => Math.abs(bytes) >= 1024 ** k * 0.9995) || 0;
    return digits(bytes / 1024 ** k) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][k];
  }

  /* ---- where things are ---- */

  const rows = [];  // every row of bars, with its top and height in pixels
  let bottom = AXIS;
  for (const lane of data.lanes) {
    lane.top = bottom;
    bottom += NAME;
    for (const row of lane.rows) {
      const ends = data.length_ns[rows.length % data.length_ns.length], [, start] = row.columns;
      const started = first(start.length, (k) => start[k] >= ends);  // of the op behind them, the wait alone is drawn
      rows.push(Object.assign(row, { stream: lane.stream, top: bottom, number: rows.length, ends, started }));
      bottom += BAR + 7;
    }
    bottom += GAP;
  }
  for (const tier of data.tiers) {
    tier.top = bottom + NAME;
    bottom += NAME + TIER + GAP;
    tier.highest = 1.08 * Math.max(tier.line, tier.peak);
    for (const row of tier.rows) {
      row.levels = Object.entries(row.kinds).map(([kind, changes]) => {
        let held = 0;
        return [kind, changes.map((change) => (held += change))];
      });
      row.totals = row.times.map((_, j) => row.levels.reduce((sum, [, levels]) => sum + levels[j], 0));
    }
  }
  const height = bottom;
  const width = () => canvas.clientWidth;
  const x = (ns) => ((ns - view[0]) / (view[1] - view[0])) * width();
  const ns = (x) => view[0] + (x / width()) * (view[1] - view[0]);

  /** The first place in a list in order where `past` holds. */
  function first(length, past) {
    let low = 0, high = length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (past(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function colour(op) {
    const [, what, paleness] = data.ops[op];
    const rgb = [1, 3, 5].map((k) => parseInt(data.colours[what].slice(k, k + 2), 16));
    return `rgb(${rgb.map((part) => Math.round(255 - paleness * (255 - part)))})`;
  }
  const colours = data.ops.map((_, op) => colour(op));

  /* ---- drawing ---- */

  function bar(row, from, to, below, tall, fill) {
    const left = Math.max(-2, x(from)), right = Math.min(width() + 2, x(Math.min(to, row.ends)));
    if (right < 0 || left > width() || from >= row.ends) return;
    const pixel = 1 / (devicePixelRatio || 1), edge = (at) => Math.round(at / pixel) * pixel;  // whole ones: no mixed colours
    paint.fillStyle = fill;
    paint.fillRect(edge(left), row.top + below, Math.max(edge(right) - edge(left), pixel), tall);  // what is narrower than a pixel has one
  }

  function drawRow(row) {
    const [op, start, duration, ready, input, memory, slow] = row.columns;
    for (let k = first(op.length, (k) => start[k] + duration[k] >= view[0]); k < op.length; k++) {
      const waits = start[k] - ready[k];
      if (waits - input[k] > view[1]) break;
      const end = start[k] + duration[k];
      if (input[k]) bar(row, waits - input[k], waits, BAR + 1, 2, Object.values(data.waits)[0]);
      if (memory[k]) bar(row, waits, waits + memory[k], BAR + 1, 2, Object.values(data.waits)[1]);
      if (k >= row.started) break;
      bar(row, start[k], end, 0, BAR, colours[op[k]]);
      if (slow[k]) bar(row, end - slow[k], end, -3, 2, Object.values(data.waits)[2]);
      const room = Math.min(width(), x(Math.min(end, row.ends))) - Math.max(0, x(start[k]));
      if (room > 60) label(data.ops[op[k]][0], Math.max(0, x(start[k])) + 4, row.top + BAR - (BAR > 20 ? 7 : 4), INK, room - 8);
    }
  }

  function label(text, left, base, fill, room) {
    if (room && paint.measureText(text).width > room) return;
    paint.fillStyle = fill;
    paint.fillText(text, left, base);
  }

  function drawTier(tier) {
    const y = (bytes) => tier.top + TIER - (bytes / tier.highest) * TIER;
    label(`${tier.name}: peak ${size(tier.peak)} of ${size(tier.capacity)}`, 0, tier.top - 5, INK);
    tier.rows.forEach((row, number) => {
      const from = Math.max(0, first(row.times.length, (k) => row.times[k] > view[0]) - 1);
      const until = Math.min(row.times.length, first(row.times.length, (k) => row.times[k] > view[1]) + 1);
      const shown = [];  // moments and where they begin: of each pixel the highest one, then the last one
      for (let j = from; j < until; ) {
        const pixel = Math.floor(x(row.times[j]));
        let highest = j;
        while (++j < until && Math.floor(x(row.times[j])) === pixel) if (row.totals[j] > row.totals[highest]) highest = j;
        shown.push([highest, x(row.times[highest])]);
        if (highest < j - 1) shown.push([j - 1, pixel + 1]);
      }
      const below = new Array(shown.length).fill(0);
      row.levels.forEach(([kind, levels], k) => {
        const path = new Path2D(), back = [];
        shown.forEach(([j, left], n) => {
          const right = n + 1 < shown.length ? Math.max(left, shown[n + 1][1]) : left;
          const low = below[n], high = (below[n] += levels[j]);
          path.lineTo(left, y(high));
          path.lineTo(right, y(high));
          back.push([left, y(low)], [right, y(low)]);
        });
        if (single) {
          back.reverse().forEach(([left, base]) => path.lineTo(left, base));
          paint.fillStyle = data.colours[kind] || data.colours.other;
          paint.fill(path);
        } else if (k === row.levels.length - 1) {
          paint.setLineDash(number ? [] : [5, 3]);
          paint.strokeStyle = data.lines[number % data.lines.length];
          paint.lineWidth = 1.5;
          paint.stroke(path);
        }
      });
    });
    line(0, y(tier.line), width(), y(tier.line), INK, tier.line < tier.capacity ? [2, 3] : [6, 3]);
    line(0, tier.top + TIER, width(), tier.top + TIER, SOFT, []);
    const text = tier.line < tier.capacity ? "the capacity is far above" : "dashed: capacity";
    label(text, width() - paint.measureText(text).width, tier.top - 5, SOFT);
  }

  function line(x0, y0, x1, y1, stroke, dash) {
    paint.strokeStyle = stroke;
    paint.lineWidth = 1;
    paint.setLineDash(dash);
    paint.beginPath();
    paint.moveTo(x0, y0);
    paint.lineTo(x1, y1);
    paint.stroke();
    paint.setLineDash([]);
  }

  function drawAxis() {
    const rough = (view[1] - view[0]) / Math.max(2, width() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = power * [1, 2, 5, 10].find((k) => k * power >= rough);
    const [scale, unit] = view[1] >= 2e9 ? [1e9, "s"] : view[1] >= 2e6 ? [1e6, "ms"] : [1e3, "µs"];
    const places = Math.max(0, -Math.floor(Math.log10(tick / scale) + 1e-9));
    for (let k = Math.ceil(view[0] / tick); k * tick <= view[1]; k++) {
      line(x(k * tick), AXIS - 5, x(k * tick), height, GRID, []);
      const text = (k * tick / scale).toFixed(places) + " " + unit, wide = paint.measureText(text).width;
      label(text, Math.min(Math.max(0, x(k * tick) - wide / 2), width() - wide), AXIS - 8, SOFT);
    }
  }

  function draw() {
    const scale = devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width() * scale);
    canvas.height = Math.round(height * scale);
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.font = "12px system-ui, sans-serif";
    drawAxis();
    for (const lane of data.lanes) {
      label(lane.stream, 0, lane.top + 13, INK);
      const busy = lane.rows.map((row) => row.busy).join(", "), room = width() - paint.measureText(busy).width;
      label(busy, room, lane.top + 13, SOFT);
    }
    rows.forEach(drawRow);
    data.tiers.forEach(drawTier);
    data.ends_ns.forEach((ends, number) => rows.filter((_, k) => k % data.ends_ns.length === number).forEach((row) =>
      ends.forEach((end) => line(x(end), row.top - 3, x(end), row.top + BAR + 3, INK, []))));
    if (chosen) {
      const [, start, duration] = chosen.row.columns, left = x(start[chosen.k]);
      paint.strokeStyle = INK;
      paint.lineWidth = 2;
      paint.strokeRect(left - 1, chosen.row.top - 1, Math.max(x(start[chosen.k] + duration[chosen.k]) - left, 1) + 2, BAR + 2);
    }
  }

  /* ---- what is pointed at ---- */

  function say(text, left, top) {
    tip.textContent = text;
    tip.style.left = Math.max(0, Math.min(left + 14, box.clientWidth - tip.offsetWidth)) + "px";
    tip.style.top = canvas.offsetTop + top + 16 + "px";
  }

  function words(row, k) {
    const [op, start, duration, , input, memory, slow] = row.columns, [key, , , bytes, how] = data.ops[op[k]];
    const parts = [`${key}${row.name ? " (" + row.name + ")" : ""}`, `starts ${exact(start[k])}, takes ${time(duration[k])}`];
    if (bytes >= 0) parts.push(`${size(bytes)} ${how}` + (how === "moved" && duration[k] ? `, ${digits(bytes / duration[k])} GB/s` : ""));
    if (input[k]) parts.push(`waited ${time(input[k])} for input`);
    if (memory[k]) parts.push(`waited ${time(memory[k])} for memory`);
    if (slow[k]) parts.push(`${time(slow[k])} added by sharing`);
    return parts.join("\n");
  }

  function opAt(left, top) {
    const row = rows.find((row) => top >= row.top - 3 && top <= row.top + BAR + 4);
    if (!row) return null;
    const [op, start, duration] = row.columns, at = ns(left), near = 4 * (ns(1) - ns(0));
    const after = first(op.length, (k) => start[k] + duration[k] >= at);
    const off = (k) => Math.max(start[k] - at, at - start[k] - duration[k], 0);
    const [k] = [after, after - 1].filter((k) => k >= 0 && k < row.started && off(k) <= near).sort((a, b) => off(a) - off(b));
    return k === undefined ? null : { row, k };
  }

  function held(left, top) {
    const tier = data.tiers.find((tier) => top >= tier.top && top <= tier.top + TIER);
    if (!tier) return "";
    const texts = tier.rows.map((row) => {
      const j = Math.max(0, first(row.times.length, (k) => row.times[k] > ns(left)) - 1);
      const parts = row.levels.map(([kind, levels]) => [kind, levels[j]]).filter(([, bytes]) => bytes).reverse();
      const sum = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
      return `${row.name ? row.name + ": " : ""}${size(sum)}\n` + parts.map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(", ");
    });
    return [`${tier.name} at ${exact(ns(left))}`, ...texts].join("\n");
  }

  function point(event) {
    const found = opAt(event.offsetX, event.offsetY);
    chosen = found;
    say(found ? words(found.row, found.k) : held(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    later();
  }

  /* ---- moving ---- */

  let waiting = false;
  function later() {
    if (!waiting) requestAnimationFrame(() => ((waiting = false), draw()));
    waiting = true;
  }

  function show(from, long) {
    long = Math.min(whole, Math.max(SHORTEST_NS, long));
    from = Math.min(Math.max(0, from), whole - long);
    view = [from, from + long];
    later();
  }

  const zoom = (factor, at) => show(at - (at - view[0]) * factor, (view[1] - view[0]) * factor);

  /** Chooses an op, and moves the view where it is not in it. */
  function choose(row, k) {
    const [op, start, duration] = row.columns;
    if (!row.started) return;
    k = Math.min(Math.max(k, 0), row.started - 1);
    chosen = { row, k };
    const long = view[1] - view[0];
    if (start[k] < view[0] || start[k] + duration[k] > view[1]) show(start[k] - long / 4, Math.max(long, 1.5 * duration[k]));
    say(words(row, k), x(start[k]), row.top + BAR);
    later();
  }

  function key(name) {
    const middle = (view[0] + view[1]) / 2, long = view[1] - view[0];
    const row = chosen ? chosen.row : rows[0];
    const [, start, duration] = row.columns;
    const next = chosen ? chosen.k : first(start.length, (k) => start[k] + duration[k] >= view[0]) - 1;
    if (name === "+" || name === "=") zoom(0.5, chosen ? Math.min(Math.max(start[chosen.k], view[0]), view[1]) : middle);
    else if (name === "-") zoom(2, middle);
    else if (name === "0" || name === "Home") show(0, whole);
    else if (name === "ArrowLeft") show(view[0] - long / 5, long);
    else if (name === "ArrowRight") show(view[0] + long / 5, long);
    else if (name === "n" || name === "N") choose(row, next + 1);
    else if (name === "p" || name === "P") choose(row, next - 1);
    else if (name === "l" || name === "L") {
      const other = rows[(row.number + (chosen ? 1 : 0)) % rows.length], at = chosen ? start[chosen.k] : view[0];
      choose(other, first(other.columns[1].length, (k) => other.columns[1][k] >= at));
    } else return false;
    return true;
  }

  canvas.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && key(event.key)) event.preventDefault();
  });
  box.querySelectorAll("button").forEach((button) => button.addEventListener("click", () => key(button.dataset.key)));
  canvas.addEventListener("wheel", (event) => {
    const factor = Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY / 300)));
    if (!event.ctrlKey && (document.activeElement !== canvas || (factor > 1 && view[1] - view[0] >= whole))) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) show(view[0] + ns(event.deltaX) - ns(0), view[1] - view[0]);
    else zoom(factor, ns(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { left: event.offsetX, from: view[0] };
    canvas.setPointerCapture(event.pointerId);
    canvas.focus({ preventScroll: true });
    point(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) show(drag.from - (ns(event.offsetX) - ns(drag.left)), view[1] - view[0]);
    point(event);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (drag = null));
  canvas.addEventListener("pointerleave", () => ((chosen = null), say("", 0, 0), later()));
  addEventListener("resize", later);

  function named(text, fill) {
    const item = document.createElement("span"), square = document.createElement("i");
    square.style.background = fill;
    item.append(square, text);
    box.querySelector(".legend").append(item);
  }
  const used = new Map();  // a colour, and what it stands for: updates and the states that they need share one
  for (const [, what] of data.ops) used.set(data.colours[what], (used.get(data.colours[what]) || new Set()).add(what));
  if (single) {
    for (const kind of data.tiers.flatMap((tier) => Object.keys(tier.rows[0].kinds))) {
      const fill = data.colours[kind] || data.colours.other;
      used.set(fill, (used.get(fill) || new Set()).add(data.colours[kind] ? kind : "other"));
    }
  }
  Object.keys(data.waits).forEach((name, k) => {
    if (rows.some((row) => row.columns[4 + k].some((waited) => waited > 0))) used.set(data.waits[name], new Set([name]));
  });
  for (const [fill, names] of used) named([...names].join(", "), fill);
  if (!single && data.tiers.length) data.tiers[0].rows.forEach((row, k) => named(`bytes, ${row.name}`, data.lines[k % 2]));
  draw();
  if (box.dataset.focus) canvas.focus({ preventScroll: true });
}
