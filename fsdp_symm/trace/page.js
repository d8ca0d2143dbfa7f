"use strict";
// Timelines on canvas. DATA: {views: [{title, ranks: [{label, span_us, lanes, names, rows}]}]}
// rows: [lane, start_us, duration_us, colour name index, text index]; all views share one zoom, so they compare.
const DATA = JSON.parse(document.getElementById("data").textContent);
const LANE = 34, TOP = 22, LEFT = 96;
const tip = document.getElementById("tip");
const longest = Math.max(1, ...DATA.views.flatMap(v => v.ranks.map(r => r.span_us)));
const zoom = { from: 0, to: longest };
const plots = [];
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function tick(span) {
  const raw = span / 6, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
}
const short = us => us >= 1000 ? +(us / 1000).toFixed(3) + " ms" : +us.toFixed(2) + " µs";

class Plot {
  constructor(view, box) {
    this.view = view; this.box = box; this.rank = 0;
    this.canvas = box.querySelector("canvas");
    const pick = box.parentElement.querySelector("select");
    if (pick) pick.onchange = () => { this.rank = +pick.value; this.draw(); };
    this.canvas.addEventListener("pointermove", e => this.hover(e));
    this.canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    this.canvas.addEventListener("wheel", e => {
      if (!e.ctrlKey && !e.shiftKey) return; // plain scrolling stays the page's
      e.preventDefault(); rescale(e.deltaY > 0 ? 1.25 : 0.8, this.time(e.offsetX));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", e => { this.drag = { x: e.clientX, from: zoom.from }; this.canvas.setPointerCapture(e.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.drag = null; });
  }
  get data() { return this.view.ranks[this.rank]; }
  get left() { return this.canvas.clientWidth < 520 ? 12 : LEFT; }
  get inner() { return this.canvas.clientWidth - this.left - 8; }
  x(t) { return this.left + (t - zoom.from) / (zoom.to - zoom.from) * this.inner; }
  time(x) { return zoom.from + (x - this.left) / this.inner * (zoom.to - zoom.from); }
  laneTop(i) { return TOP + i * (this.left < LEFT ? LANE + 16 : LANE) + (this.left < LEFT ? 16 : 0); }
  draw() {
    const lanes = this.data.lanes, narrow = this.left < LEFT, ratio = devicePixelRatio || 1;
    const height = TOP + lanes.length * (narrow ? LANE + 16 : LANE) + 8, width = this.canvas.clientWidth;
    this.canvas.style.height = height + "px";
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio); g.clearRect(0, 0, width, height); g.font = "12px system-ui, sans-serif";
    this.axis(g, width, height);
    const shades = {};
    g.save(); g.beginPath(); g.rect(this.left, 0, this.inner, height); g.clip();
    for (const [lane, start, length, shade] of this.data.rows) {
      const a = this.x(start), b = this.x(start + length);
      if (b < this.left || a > width) continue;
      const key = this.data.names[shade];
      g.fillStyle = shades[key] ??= colour(key);
      g.fillRect(a, this.laneTop(lane) + 3, Math.max(b - a, 1), LANE - 8);
    }
    g.restore(); g.fillStyle = colour("text");
    lanes.forEach((name, i) => g.fillText(name, narrow ? this.left : 8, narrow ? this.laneTop(i) - 2 : this.laneTop(i) + 20));
  }
  axis(g, width, height) {
    const step = tick(zoom.to - zoom.from);
    g.strokeStyle = colour("line"); g.fillStyle = colour("soft");
    for (let t = Math.ceil(zoom.from / step) * step; t <= zoom.to; t += step) {
      const x = Math.round(this.x(t)) + 0.5, label = short(t), w = g.measureText(label).width;
      g.beginPath(); g.moveTo(x, TOP - 4); g.lineTo(x, height); g.stroke();
      if (x + w + 4 < width) g.fillText(label, x + 3, 13);
    }
  }
  hover(e) {
    if (this.drag) {
      const span = zoom.to - zoom.from;
      const shift = (this.drag.x - e.clientX) / this.inner * span;
      zoom.from = Math.min(Math.max(0, this.drag.from + shift), longest - span); zoom.to = zoom.from + span;
      plots.forEach(p => p.draw()); return;
    }
    const t = this.time(e.offsetX), slack = (zoom.to - zoom.from) / this.inner * 2;
    let best = null;
    for (const row of this.data.rows) {
      const top = this.laneTop(row[0]);
      if (e.offsetY < top || e.offsetY > top + LANE || t < row[1] - slack || t > row[1] + row[2] + slack) continue;
      const gap = Math.max(row[1] - t, t - row[1] - row[2], 0);
      if (!best || gap < best.gap || (gap === best.gap && row[2] < best.row[2])) best = { gap, row };
    }
    if (!best) { tip.style.display = "none"; return; }
    tip.textContent = this.data.names[best.row[4]] + "\n" + short(best.row[2]) + " at " + short(best.row[1]);
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(e.clientX + 12, innerWidth - box.width - 4)) + "px";
    tip.style.top = (e.clientY + 16 + box.height > innerHeight ? e.clientY - box.height - 10 : e.clientY + 16) + "px";
  }
}

function rescale(factor, around) {
  const span = Math.min(longest, Math.max(1, (zoom.to - zoom.from) * factor));
  around ??= (zoom.from + zoom.to) / 2;
  const part = (around - zoom.from) / (zoom.to - zoom.from);
  zoom.from = Math.min(Math.max(0, around - part * span), longest - span); zoom.to = zoom.from + span;
  plots.forEach(p => p.draw());
}

document.querySelectorAll(".plot").forEach((box, i) => plots.push(new Plot(DATA.views[i], box)));
document.querySelectorAll("[data-zoom]").forEach(b => { b.onclick = () => b.dataset.zoom === "all" ? rescale(1e12) : rescale(+b.dataset.zoom); });
const redraw = () => plots.forEach(p => p.draw());
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
