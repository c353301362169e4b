"use strict";
// Replays what changed in the pool at each step. The states are the scheduler's own; nothing is computed but counts.
const FREE = 0, CACHED = 1, SHARED = 2, EMPTY = 3;
const KEYFRAMES = 100; // steps between two copies of a pool, so that going back is quick
const MOST_CELLS = 65536, MOST_COPIED = 16e6; // cells drawn; blocks in all copies
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
let first = 4, pools = [], timer = null;

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// --- the pool --------------------------------------------------------------------------------------------------------

function apply(cells, changes) {
  for (let i = 0, block = 0; i < changes.length; i += 2) {
    block += changes[i];
    cells[block - 1] = changes[i + 1];
  }
}

// The pool at a step, from the nearest copy before it.
function cellsAt(pool, step) {
  const copy = Math.floor(step / pool.gap);
  const cells = pool.copies[copy].slice();
  for (let i = copy * pool.gap + 1; i <= step; i++) apply(cells, pool.film.changes[i]);
  return cells;
}

// Copies of the pool, and the step that uses most of it.
function copiesOf(film) {
  const cells = new Uint32Array(film.blocks), copies = [];
  const gap = Math.max(KEYFRAMES, Math.ceil(film.changes.length * film.blocks / MOST_COPIED));
  let used = 0, most = 0, fullest = 0;
  film.changes.forEach((changes, step) => {
    for (let i = 0, block = 0; i < changes.length; i += 2) {
      block += changes[i];
      used += (changes[i + 1] >= SHARED) - (cells[block - 1] >= SHARED);
      cells[block - 1] = changes[i + 1];
    }
    if (used > most) [most, fullest] = [used, step];
    if (step % gap === 0) copies.push(cells.slice());
  });
  return { copies, fullest, gap };
}

// What a cell of several blocks shows: what most of them are.
function shown(cells, index, each) {
  if (each === 1) return cells[index];
  const tally = new Map();
  for (const owner of cells.subarray(index * each, (index + 1) * each)) tally.set(owner, (tally.get(owner) ?? 0) + 1);
  return [...tally].reduce((a, b) => (b[1] > a[1] ? b : a))[0];
}

function counts(cells) {
  const found = { used: 0, cached: 0, shared: 0, empty: 0, free: 0 };
  for (const owner of cells) {
    if (owner === FREE) found.free++;
    else if (owner === CACHED) found.cached++;
    else {
      found.used++;
      if (owner === SHARED) found.shared++;
      if (owner === EMPTY) found.empty++;
    }
  }
  return found;
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function colorOf(owner) {
  if (owner === FREE) return isDark ? [24, 29, 33] : [252, 252, 251];
  if (owner === CACHED) return isDark ? [74, 104, 90] : [169, 199, 185];
  if (owner === SHARED) return [224, 159, 31];
  if (owner === EMPTY) return isDark ? [120, 80, 106] : [217, 166, 198];
  const hue = 180 + ((owner - first) * 47) % 130, light = 0.42 + 0.06 * ((owner - first) % 4); // blues and purples
  const a = 0.6 * Math.min(light, 1 - light);
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

function drawCells(pool, cells) {
  const { canvas, columns, size } = pool, context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  for (let index = 0; index < Math.ceil(cells.length / pool.each); index++) {
    const [red, green, blue] = colorOf(shown(cells, index, pool.each));
    const left = (index % columns) * size, top = Math.floor(index / columns) * size;
    for (let y = 0; y < size - (size > 3 ? 1 : 0); y++) {
      for (let x = 0; x < size - (size > 3 ? 1 : 0); x++) {
        const at = 4 * ((top + y) * canvas.width + left + x);
        image.data.set([red, green, blue, 255], at);
      }
    }
  }
  context.putImageData(image, 0, 0);
}

function drawLines(pool, step) {
  const canvas = pool.lines, context = canvas.getContext("2d"), { film } = pool, dots = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * dots, height * dots];
  context.scale(dots, dots);
  const last = Math.max(1, film.seconds.length - 1);
  const ink = getComputedStyle(document.body).color;
  context.clearRect(0, 0, width, height);
  context.font = "13px system-ui, sans-serif";
  const tracks = [["running", film.running, []], ["waiting", film.waiting, [5, 4]], ["tokens a step", film.tokens, [2, 3]]];
  tracks.forEach(([label, values, dash], row) => {
    const top = row * height / 3 + 16, room = height / 3 - 20, most = Math.max(1, ...values);
    context.strokeStyle = ink;
    context.fillStyle = ink;
    context.setLineDash([]);
    context.fillText(`${label}, at most ${number.format(most)}`, 2, top - 4);
    context.setLineDash(dash);
    context.beginPath();
    values.forEach((value, index) => context.lineTo(index / last * width, top + room * (1 - value / most)));
    context.stroke();
  });
  context.setLineDash([]);
  context.fillStyle = "#d9534f";
  film.preemptions.forEach((count, index) => {
    if (index && count > film.preemptions[index - 1]) context.fillRect(index / last * width - 1, 0, 2, 6);
  });
  context.strokeStyle = "#d9534f";
  context.beginPath();
  context.moveTo(step / last * width, 0);
  context.lineTo(step / last * width, height);
  context.stroke();
}

function showPool(pool, step) {
  const { film } = pool, at = Math.min(step, film.seconds.length - 1);
  pool.cells = cellsAt(pool, at);
  const blocks = counts(pool.cells);
  drawCells(pool, pool.cells);
  drawLines(pool, at);
  const rows = { time: `${film.seconds[at].toFixed(2)} s`, running: film.running[at], waiting: film.waiting[at], "tokens this step": film.tokens[at],
    preemptions: film.preemptions[at], "blocks used": blocks.used, shared: blocks.shared, "prefix cache": blocks.cached,
    "reserved, empty": blocks.empty, free: blocks.free };
  pool.facts.replaceChildren(...Object.entries(rows).map(([label, value]) => element("div", {}, element("dt", {}, label),
    element("dd", { "data-fact": label }, typeof value === "number" ? number.format(value) : value))));
}

function show() {
  const step = Number(byId("step").value);
  byId("number").textContent = number.format(step + 1);
  byId("step").setAttribute("aria-valuetext", `step ${step + 1}, ${pools.map((pool) => `${pool.film.name} ${pool.film.seconds[Math.min(step, pool.film.seconds.length - 1)].toFixed(1)} s`).join(", ")}`);
  pools.forEach((pool) => showPool(pool, step));
}

// --- building --------------------------------------------------------------------------------------------------------

function ownerText(pool, index) {
  const owner = shown(pool.cells, index, pool.each), end = Math.min((index + 1) * pool.each, pool.film.blocks);
  const whose = ["free", "free, in the prefix cache", "shared by several requests", "reserved, nothing in it yet"][owner];
  const blocks = pool.each > 1 ? `blocks ${number.format(index * pool.each + 1)} to ${number.format(end)}, most of them` : `block ${number.format(end)}`;
  return `${blocks}: ${whose ?? `request ${number.format(owner - first)}`}`;
}

function build(film) {
  const wide = Math.max(320, Math.min(760, document.querySelector("main").clientWidth / 1.05));
  const each = Math.ceil(film.blocks / MOST_CELLS), count = Math.ceil(film.blocks / each);
  const size = Math.max(2, Math.min(14, Math.floor(Math.sqrt(wide * 420 / count))));
  const columns = Math.max(1, Math.floor(wide / size)), rows = Math.ceil(count / columns);
  const canvas = element("canvas", { width: columns * size, height: rows * size, role: "img", "aria-label": `The KV pool, ${film.name}` });
  const lines = element("canvas", { class: "lines", width: 760, height: 180, role: "img", "aria-label": `Requests and tokens over the steps, ${film.name}` });
  const facts = element("dl", {}), pointed = element("p", { class: "note pointed" });
  const pool = { film, canvas, lines, facts, columns, size, each, ...copiesOf(film) };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) * canvas.width / box.width / size), y = Math.floor((event.clientY - box.top) * canvas.height / box.height / size);
    const index = y * columns + x;
    pointed.textContent = index < count ? ownerText(pool, index) : "";
  });
  byId("pools").append(element("section", {}, element("h2", {}, `${film.name}: ${number.format(film.blocks)} blocks of ${film.block_size} tokens${each > 1 ? `, ${each} to a cell` : ""}`),
    facts, canvas, pointed, lines));
  return pool;
}

function play() {
  const isPlaying = timer !== null, slider = byId("step");
  byId("play").textContent = isPlaying ? "Play" : "Pause";
  byId("play").setAttribute("aria-pressed", String(!isPlaying));
  if (isPlaying) {
    clearInterval(timer);
    timer = null;
    return;
  }
  if (slider.value === slider.max) slider.value = 0;
  timer = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    show();
    if (slider.value === slider.max) play();
  }, 50);
}

async function start() {
  try {
    const packed = Uint8Array.from(atob(byId("film").textContent.trim()), (sign) => sign.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const data = await new Response(stream).json();
    first = data.first;
    pools = data.films.filter((film) => film.seconds.length).map(build);
  } catch (error) {
    byId("problem").hidden = false;
    byId("problem").textContent = `The film in this page cannot be read (${error}); make it again with --film.`;
    return;
  }
  byId("step").max = Math.max(0, ...pools.map((pool) => pool.film.seconds.length - 1));
  byId("step").value = pools[0]?.fullest ?? 0;
  byId("step").addEventListener("input", show);
  addEventListener("resize", show);
  byId("play").addEventListener("click", play);
  show();
  document.documentElement.dataset.ready = "yes";
}

start();
