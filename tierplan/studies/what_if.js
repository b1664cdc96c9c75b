"use strict";
const grid = JSON.parse(document.getElementById("grid").textContent);
const { axes, rows } = grid;
const HARDWARE = ["gpu.part", "gpu.count", "host.capacity", "nvme.drives"];
const chosen = axes.map(() => 0);
const at = (place) => rows[place.reduce((sum, i, k) => sum + i * axes[k].stride, 0)];
const withValue = (k, i) => chosen.map((j, n) => (n === k ? i : j));
const whole = (x) => Math.round(x).toLocaleString("en-US");
const usd = (x) => "$" + whole(x);
const same = (a, b) => a.every((i, k) => i === b[k]);

function short(x) {
  const [scale, unit] = x >= 1e9 ? [1e9, " B"] : x >= 1e6 ? [1e6, " M"] : x >= 1e3 ? [1e3, " k"] : [1, ""];
  return Number((x / scale).toPrecision(3)) + unit;
}

function make(tag, attributes, ...children) {
  const drawn = ["svg", "path", "circle", "text", "line", "title", "g"].includes(tag);
  const node = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/* ---- controls: a select for names, radio buttons for numbers ---- */

function drawControls() {
  axes.forEach((axis, k) => {
    const choose = (event) => go(withValue(k, Number(event.target.value)));
    let control;
    if (["model", "policy", "gpu.part"].includes(axis.key) || axis.texts.length > 6) {
      const options = axis.texts.map((text, i) => make("option", { value: i }, text));
      control = make("select", { id: `axis${k}`, "aria-label": axis.label, onchange: choose }, ...options);
    } else {
      const radio = (text, i) =>
        make("label", {}, make("input", { type: "radio", name: `axis${k}`, value: i, onchange: choose }), text);
      control = make("div", { class: "radios" }, ...axis.texts.map(radio));
    }
    document.getElementById("controls").append(make("fieldset", {}, make("legend", {}, axis.label), control));
  });
}

function showChosen() {
  axes.forEach((_, k) => {
    const select = document.getElementById(`axis${k}`);
    if (select) select.value = chosen[k];
    else document.querySelectorAll(`[name=axis${k}]`).forEach((r) => (r.checked = Number(r.value) === chosen[k]));
  });
}

function go(place) {
  place.forEach((i, k) => (chosen[k] = i));
  const words = new URLSearchParams(axes.map((axis, k) => [axis.key, axis.texts[chosen[k]]]));
  history.replaceState(null, "", "#" + words);
  show();
}

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  axes.forEach((axis, k) => (chosen[k] = Math.max(0, axis.texts.indexOf(words.get(axis.key)))));
  show();
}

/* ---- the answer ---- */

function table(head, body) {
  const cells = (row, tag) => row.map((cell) => make(tag, {}, cell));
  const lines = body.map(([row, marked]) => make("tr", { class: marked ? "chosen" : false }, ...cells(row, "td")));
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...cells(head, "th"))), make("tbody", {}, ...lines)));
}

function card([label, figure, remark]) {
  const parts = figure.split(/(?<=\.)(?=[a-z])/);  // gpu0.compute breaks behind its dot
  const broken = parts.flatMap((part, i) => (i ? [make("wbr", {}), part] : [part]));
  return make("div", { class: "card" }, make("span", {}, label), make("b", {}, ...broken), make("span", {}, remark));
}

function show() {
  showChosen();
  const row = at(chosen);
  const parts = row.fits ? answer(row) : [
    make("h2", {}, "Cannot be trained like this"), make("p", { class: "lead", id: "headline" }, row.why)];
  parts.push(make("h2", {}, "Methods, for the same work"), methods());
  parts.push(...frontier());
  const words = row.command.split(/(?<= )/).map((word) => make("span", {}, word));  // options are not broken behind their dashes
  parts.push(make("h2", {}, "The same in a terminal"), make("p", {}, make("code", { id: "command" }, ...words)));
  const focused = document.activeElement.closest("#answer button")?.textContent;
  document.getElementById("answer").replaceChildren(...parts);
  if (focused) [...document.querySelectorAll("#answer button")].find((b) => b.textContent === focused)?.focus();
}

function answer(row) {
  const facts = row.costs.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]);
  const tier = ([name, peak, capacity, text]) => {
    const width = Math.min(100, (100 * peak) / capacity);
    const bar = make("div", { role: "img", "aria-label": `${name}: ${text}` }, make("i", { style: `width:${width}%` }));
    return make("div", { class: "tier" }, make("span", {}, name), bar, make("span", {}, text));
  };
  const cards = [
    ["Step", row.step, row.how],
    ["Limited by", row.limited_by, row.limited.replace(`${row.limited_by}: `, "")],
    [grid.job, row.costs[0][1], row.costs[1][1]],
  ];
  if (row.lasts) cards.push(["Drives last", row.lasts, row.life.replace(`${row.lasts} `, "")]);
  return [
    make("h2", { id: "headline" }, `${whole(row.tokens_per_s)} tokens/s, ${short(row.tokens_per_s * 86400)} a day`),
    ...(row.note ? [make("p", { class: "alarm" }, row.note)] : []),
    ...(row.alarm ? [make("p", { class: "alarm" }, `The drives are worn out after ${row.lasts} of this training.`)] : []),
    make("div", { class: "cards" }, ...cards.map(card)),
    make("h2", {}, "Memory: the peak of each tier, of its capacity"), make("div", { id: "memory" }, ...row.memory.map(tier)),
    make("div", { class: "pair" },
      make("section", {}, make("h2", {}, "What limits"),
        table(["", "used", "twice as good saves"], row.limits.map((limit) => [limit, false])),
        make("p", { class: "soft" }, row.limits_note)),
      make("section", {}, make("h2", {}, `${grid.job}: time, money, wear`), make("dl", {}, ...facts))),
  ];
}

function methods() {
  const k = axes.findIndex((axis) => axis.key === "policy");
  const body = axes[k].texts.map((name, i) => {
    const row = at(withValue(k, i));
    const speed = row.fits ? whole(row.tokens_per_s) : "does not run";
    return [[link(name, withValue(k, i)), row.fits ? row.step : "–", speed, row.fits ? row.limited_by : "–"], i === chosen[k]];
  });
  return table(["", "step", "tokens/s", "limited by"], body);
}

function link(text, place) {
  return make("button", { type: "button", onclick: () => go(place) }, text);
}

/* ---- money against tokens per day, for the chosen model, method and sequences ---- */

function machines() {
  let places = [chosen.slice()];
  axes.forEach((axis, k) => {
    if (HARDWARE.includes(axis.key)) {
      places = places.flatMap((place) => axis.texts.map((_, i) => place.map((j, n) => (n === k ? i : j))));
    }
  });
  return places.map((place) => ({ place, row: at(place) })).filter(({ row }) => row.fits && row.price_usd !== null)
    .map(({ place, row }) => ({ place, usd: row.price_usd, tokens: row.tokens_per_s * 86400 }));
}

function nameOf(place) {
  const words = axes.map((axis, k) => [axis, axis.texts[place[k]]]).filter(([axis]) => HARDWARE.includes(axis.key));
  const text = { "gpu.count": (n) => (n === "1" ? "" : `${n} GPUs`), "nvme.drives": (n) => (n === "1" ? "1 drive" : `${n} drives`) };
  return words.map(([axis, value]) => (text[axis.key] || String)(value)).filter(Boolean).join(", ");
}

function roundTicks(low, high, number) {
  const rough = (high - low) / number, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high * (1 + 1e-9); t += step) ticks.push(t);
  return ticks;
}

function frontier() {
  const heading = make("h2", {}, "Money against tokens per day");
  const all = machines();
  if (!all.length) return [heading, make("p", { class: "soft" }, "No machine whose price is known can train this.")];
  const best = [];
  for (const m of [...all].sort((a, b) => a.usd - b.usd || b.tokens - a.tokens)) {
    if (!best.length || m.tokens > best[best.length - 1].tokens * (1 + grid.quicker_frac)) best.push(m);
  }
  const note = make("p", { class: "soft" }, `Each dot is a machine, new, with the chosen model, method and sequences: ${all.length}` +
    ` of them. Those on the line are at least ${100 * grid.quicker_frac} % quicker than any cheaper one. Dots and rows can be chosen.`);
  const body = best.map((m, i) => [[link(`${i + 1}. ${nameOf(m.place)}`, m.place), usd(m.usd), short(m.tokens)], same(m.place, chosen)]);
  return [heading, note, plot(all, best), table(["on the line", "price", "tokens a day"], body)];
}

function plot(all, best) {
  const width = Math.max(300, Math.min(832, document.getElementById("answer").clientWidth)), height = 340;
  const box = { left: 52, right: width - 14, top: 24, bottom: height - 42 };
  const prices = all.map((m) => m.usd), margin = 0.06 * (Math.max(...prices) - Math.min(...prices)) || 100;
  const [low, high] = [Math.min(...prices) - margin, Math.max(...prices) + margin];
  const top = 1.12 * Math.max(...all.map((m) => m.tokens));
  const x = (v) => box.left + ((v - low) / (high - low)) * (box.right - box.left);
  const y = (v) => box.bottom - (v / top) * (box.bottom - box.top);
  const svg = make("svg", { class: "frontier", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "Price of a machine against tokens per day; the table below lists the machines on the frontier" });
  const line = (x1, y1, x2, y2, colour) => make("line", { x1, y1, x2, y2, stroke: colour });
  const text = (words, attributes) => make("text", { fill: "#59636e", ...attributes }, words);
  for (const t of roundTicks(0, top, 5)) {
    svg.append(line(box.left, y(t), box.right, y(t), "#e6ebf0"), text(short(t), { x: box.left - 6, y: y(t) + 4, "text-anchor": "end" }));
  }
  for (const t of roundTicks(low, high, width / 110)) {
    svg.append(line(x(t), box.bottom, x(t), box.bottom + 5, "#59636e"), text(usd(t), { x: x(t), y: box.bottom + 19, "text-anchor": "middle" }));
  }
  svg.append(line(box.left, box.bottom, box.right, box.bottom, "#59636e"),
    text("tokens a day", { x: 0, y: 12 }), text("price of the machine", { x: box.right, y: height - 6, "text-anchor": "end" }));
  const steps = best.map((m, i) => (i ? `H${x(m.usd)}V${y(m.tokens)}` : `M${x(m.usd)} ${y(m.tokens)}`)).join("");
  svg.append(make("path", { d: `${steps}H${box.right}`, fill: "none", stroke: "#0b5cad", "stroke-width": 1.5 }));
  const dot = (m, r, fill) => make("circle", { cx: x(m.usd), cy: y(m.tokens), r, fill, onclick: () => go(m.place) },
    make("title", {}, `${nameOf(m.place)}: ${usd(m.usd)}, ${short(m.tokens)} tokens a day`));
  svg.append(...all.filter((m) => !best.includes(m)).map((m) => dot(m, 4, "#9aa4af")), ...best.map((m) => dot(m, 5, "#0b5cad")));
  best.forEach((m, i) => {
    const off = same(m.place, chosen) ? 9 : 4;  // clear of the ring
    svg.append(text(i + 1, { x: x(m.usd) - off, y: y(m.tokens) - off - 5, "text-anchor": "end", fill: "#0b5cad" }));
  });
  const here = all.find((m) => same(m.place, chosen));
  if (here) {
    const words = `chosen: ${usd(here.usd)}, ${short(here.tokens)} a day`, half = 4 * words.length;
    const label = text(words, { x: Math.min(Math.max(x(here.usd), half), width - half), y: y(here.tokens) + 24,
      "text-anchor": "middle", fill: "#a33a00", "font-weight": 600, stroke: "#fff", "stroke-width": 4, "paint-order": "stroke" });
    svg.append(make("circle", { id: "chosen", cx: x(here.usd), cy: y(here.tokens), r: 9, fill: "none", stroke: "#a33a00",
      "stroke-width": 3 }), label);
  }
  return svg;
}

drawControls();
readAddress();
addEventListener("hashchange", readAddress);
addEventListener("resize", show);
