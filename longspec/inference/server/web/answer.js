"use strict";
// One answer: its text with the origins of its tokens, its figures, and the last proposed tree.

const $ = (id) => document.getElementById(id);
const NOT_SHOWN = { "\n": "↵", "\t": "⇥", " ": "␣" };
const LEAST_TOKENS = 8; // of an answer whose speed is compared
const speeds = { vanilla: null, speculate: null }; // tokens/s of the newest answer of each kind
let drawn = 0;

function addTurn(who, className, text) {
  $("log").classList.add("talking");
  const turn = element("li", `turn ${className}`);
  const said = element("div", "said", text);
  turn.append(element("p", "who", who), said);
  $("log").querySelector("ol").append(turn);
  follow(true);
  return { turn, said };
}

function follow(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

class Answer {
  // record: what is stored of an answer, and nothing else, so that a reload restores all of it.
  constructor(record) {
    Object.assign(this, addTurn("Assistant", "assistant", ""));
    this.record = record;
    this.blocks = [];
    this.isDue = false;
    this.turn.answer = this;
  }

  static start(kind) {
    const counts = { target: 0, draft: 0, lookup: 0 };
    const record = { role: "assistant", content: "", kind, runs: [], counts, tokens: 0, rounds: 0, notes: [] };
    const answer = new Answer(record);
    answer.sent = performance.now();
    return answer;
  }

  add({ tokens, tree, timings }) {
    const record = this.record;
    const now = performance.now();
    if (tokens.length) {
      if (this.begun === undefined) {
        this.begun = now;
        record.first = (now - this.sent) / 1000;
      } else {
        record.rounds += 1;
      }
      record.seconds = (now - this.begun) / 1000;
    }
    for (const token of tokens) {
      record.tokens += 1;
      record.counts[token.origin] += 1;
      record.content += token.text;
      const last = record.runs[record.runs.length - 1];
      if (last?.[0] === token.origin) last[1] = record.content.length;
      else record.runs.push([token.origin, record.content.length]);
    }
    if (tree?.parents.some((parent) => parent >= 0)) record.round = { tree, tokens };
    if (timings) record.seconds = timings.decode_s;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => this.show());
  }

  show() {
    this.isDue = false;
    this.draw();
    this.showFigures();
    follow(false);
  }

  // Draws the text. Blocks before the last one stay, because further text does not change them.
  draw() {
    if (!$("markdown").checked) {
      this.said.replaceChildren();
      this.said.classList.add("plain");
      this.blocks = [];
      this.put(this.said, 0, this.record.content.length);
      return;
    }
    if (!this.blocks.length) this.said.replaceChildren();
    this.said.classList.remove("plain");
    const [from, last] = this.blocks.pop() ?? [0, null];
    last?.remove();
    const text = new Markdown(this.record.content, (...part) => this.put(...part));
    for (const block of text.blocks(from)) {
      this.said.append(block[1]);
      this.blocks.push(block);
    }
  }

  put(parent, start, end) {
    const runs = this.record.runs;
    let low = 0;
    for (let high = runs.length; low < high;) {
      const middle = (low + high) >> 1;
      if (runs[middle][1] > start) high = middle; else low = middle + 1;
    }
    for (; start < end; low += 1) {
      const stop = Math.min(end, runs[low][1]);
      parent.append(element("span", runs[low][0], this.record.content.slice(start, stop)));
      start = stop;
    }
  }

  get speed() {
    const { rounds, tokens, seconds } = this.record;
    return rounds && seconds > 0 ? (tokens - 1) / seconds : null;
  }

  get acceptance() {
    const { rounds, tokens } = this.record;
    return rounds ? ((tokens - 1) / rounds).toFixed(2) : "–";
  }

  showFigures() {
    const { tokens, counts, first } = this.record;
    $("speed").textContent = this.speed?.toFixed(1) ?? "–";
    $("acceptance").textContent = this.acceptance;
    $("first").textContent = first === undefined ? "–" : `${first.toFixed(2)} s`;
    $("count").textContent = tokens;
    for (const origin in counts) $(`${origin}-count`).textContent = counts[origin];
  }

  // Shows the answer as it is, with what can be done with it. retry: called to answer once more.
  end(retry) {
    const { tokens, kind, notes, round } = this.record;
    this.show();
    if (this.speed && tokens >= LEAST_TOKENS) speeds[kind] = this.speed;
    const ratio = speeds.vanilla && speeds.speculate ? (speeds.speculate / speeds.vanilla).toFixed(2) : "–";
    $("ratio").textContent = ratio;
    const line = element("div", "figures");
    const figures = [`${tokens} tokens`, `${this.speed?.toFixed(1) ?? "–"} tokens/s`];
    if (kind === "vanilla") figures.push("vanilla");
    else figures.push(`acceptance length ${this.acceptance}`);
    if (kind === "speculate" && ratio !== "–") figures.push(`${ratio} × vanilla`);
    line.append(...figures.map((figure) => element("span", "", figure)));
    line.append(...notes.map((note) => element("span", "note", note)));
    line.append(copyButton(() => this.record.content));
    const again = element("button", "link retry", "Retry");
    again.type = "button";
    again.addEventListener("click", retry);
    line.append(again);
    this.turn.append(line);
    if (round) line.append(this.treeButton());
    follow(true);
  }

  treeButton() {
    const button = element("button", "link tree", "Last proposed tree");
    const panel = element("div", "round");
    panel.id = `round-${(drawn += 1)}`;
    panel.hidden = true;
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-controls", panel.id);
    button.addEventListener("click", () => {
      if (!panel.hasChildNodes()) drawRound(panel, this.record.round);
      panel.hidden = !panel.hidden;
      button.setAttribute("aria-expanded", String(!panel.hidden));
      if (!panel.hidden) panel.scrollIntoView({ block: "nearest" });
    });
    this.turn.append(panel);
    return button;
  }
}

$("markdown").addEventListener("change", () => {
  for (const { answer } of document.querySelectorAll(".assistant")) {
    answer.blocks = [];
    answer.draw();
  }
});

function drawRound(panel, { tree, tokens }) {
  const { texts, parents, accepted } = tree;
  const origins = new Map(accepted.map((number, index) => [number, tree.origins[index]]));
  const visible = (text) => text.replace(/[\n\t ]/g, (character) => NOT_SHOWN[character]) || "(no text)";
  const item = (text, className, note) => {
    const made = element("li");
    const node = element("span", `node ${className}`, visible(text));
    if (note) node.append(element("span", "hidden", ` (${note})`));
    made.append(node);
    return made;
  };
  const below = (made, child) => {
    if (made.lastChild.tagName !== "UL") made.append(element("ul"));
    made.lastChild.append(child);
  };
  const items = texts.map((text, number) => {
    if (number === 0) return item(text, "own", "root");
    return origins.has(number) ? item(text, `on ${origins.get(number)}`, "accepted") : item(text, "", "");
  });
  let count = 0;
  parents.forEach((parent, number) => {
    if (number === 0 || parent < 0) return;
    below(items[parent], items[number]);
    count += 1;
  });
  const bonus = tokens[tokens.length - 1];
  if (bonus.origin === "target") below(items[accepted[accepted.length - 1] ?? 0], item(bonus.text, "own", "the target's token"));
  const proposed = `${count} proposed, ${accepted.length} accepted (filled).`;
  panel.append(element("p", "", `${proposed} Framed in the text color: the target's own tokens.`));
  const root = element("ul");
  root.append(items[0]);
  panel.append(root);
}
