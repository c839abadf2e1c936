"use strict";
// The conversation: sending messages, reading streams, and the state that survives a reload.

const STORED = "longspec";
const FIELDS = ["temperature", "limit", "system", "key"];
const EXAMPLES = [
  "Explain in a few sentences how rainbows form.",
  "Write a Python function that tells whether a word is a palindrome.",
  "Write a short story about a lighthouse keeper.",
  "Sort these words and repeat the list: pear, apple, fig, cherry, date.",
];
let turns = []; // what was said: { role, content, ... }
let model = null, running = null, newest = null;

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function problem(response) {
  if (response.status === 401) {
    document.querySelector("details").open = true;
    $("key").focus();
  }
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
}

async function connect() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw await problem(response);
  model = (await response.json()).data[0];
  const { method } = model.longspec;
  $("model").textContent = model.id;
  $("method").textContent = method;
  document.querySelector("fieldset").hidden = method === "vanilla";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
    }
  }
}

function decoding() {
  const isOn = document.querySelector("[value=speculate]").checked && model.longspec.method !== "vanilla";
  return isOn ? "speculate" : "vanilla";
}

async function stream(answer) {
  const system = $("system").value.trim();
  const said = turns.map(({ role, content }) => ({ role, content }));
  const limit = Number($("limit").value);
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({
      model: model.id,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
      temperature: Number($("temperature").value),
      max_tokens: limit,
      stream: true,
      longspec: { tokens: true, speculate: answer.record.kind === "speculate" },
    }),
  });
  if (!response.ok) throw await problem(response);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.longspec) answer.add(event.longspec);
    if (event.choices?.[0]?.finish_reason === "length") answer.record.notes = [`cut at ${limit} tokens`];
  }
}

// Answers the last message. Without a single token, the message goes back to where it was typed.
async function respond() {
  if (!model) await connect();
  const answer = newest = Answer.start(decoding());
  let failure = null;
  try {
    await stream(answer);
  } catch (error) {
    failure = error;
  }
  if (answer.record.tokens) {
    if (failure) answer.record.notes = [failure.name === "AbortError" ? "stopped" : "incomplete"];
    turns.push(answer.record);
    answer.end(retry);
  } else {
    answer.turn.remove();
  }
  if (failure && failure.name !== "AbortError") throw failure;
  return answer.record.content;
}

// Runs `respond` as the only one at a time, and says how it ended.
async function converse() {
  running = new AbortController();
  $("send").disabled = $("reset").disabled = true;
  $("stop").disabled = false;
  $("alert").textContent = "";
  $("status").textContent = "Generating an answer";
  document.body.classList.add("busy");
  try {
    $("status").textContent = `Answer: ${await respond()}`;
  } catch (error) {
    $("alert").textContent = error.message;
    $("status").textContent = "";
  }
  takeBackUnanswered();
  document.body.classList.remove("busy");
  running = newest = null;
  $("send").disabled = $("reset").disabled = false;
  $("stop").disabled = true;
  store();
}

function takeBackUnanswered() {
  if (turns[turns.length - 1]?.role !== "user") return;
  const typed = $("message").value;
  $("message").value = turns.pop().content + (typed && `\n${typed}`);
  $("log").querySelector("ol").lastElementChild?.remove();
  $("log").classList.toggle("talking", turns.length > 0);
}

function say(text) {
  if (!text || running) return;
  turns.push({ role: "user", content: text });
  addTurn("You", "user", text);
  store();
  converse();
}

// Replaces the last answer.
function retry() {
  if (running || turns[turns.length - 1]?.role !== "assistant") return;
  turns.pop();
  $("log").querySelector("ol").lastElementChild.remove();
  converse();
}

// Stores what a reload restores, in the browser's tab alone.
function store() {
  const said = newest?.record.tokens ? [...turns, { ...newest.record, notes: ["incomplete"] }] : turns;
  const fields = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));
  const kind = document.querySelector("fieldset :checked").value;
  const state = { said, fields, kind, markdown: $("markdown").checked, speeds };
  try {
    sessionStorage.setItem(STORED, JSON.stringify(state));
  } catch {
    sessionStorage.removeItem(STORED); // too long for the browser
  }
}

function restore() {
  const state = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
  if (!state) return;
  for (const id of FIELDS) $(id).value = state.fields[id];
  $("markdown").checked = state.markdown;
  document.querySelector(`[value=${state.kind}]`).checked = true;
  Object.assign(speeds, state.speeds);
  turns = state.said;
  for (const turn of turns) {
    if (turn.role === "user") addTurn("You", "user", turn.content);
    else new Answer(turn).end(retry);
  }
  takeBackUnanswered();
}

function forget() {
  turns = [];
  $("log").querySelector("ol").replaceChildren();
  $("log").classList.remove("talking");
}

document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  say(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  document.querySelector("form").requestSubmit();
});
const stop = () => {
  if (!running) return;
  running.abort();
  $("message").focus();
};
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("key").addEventListener("change", () => {
  connect().then(() => { $("alert").textContent = ""; }, (error) => { $("alert").textContent = error.message; });
});
$("reset").addEventListener("click", () => {
  forget();
  $("status").textContent = "New conversation";
  $("message").focus();
  store();
});
for (const text of EXAMPLES) {
  const button = element("button", "example", text);
  button.type = "button";
  button.addEventListener("click", () => say(text));
  $("examples").appendChild(element("li")).append(button);
}
window.addEventListener("pagehide", store);
try {
  restore();
} catch {
  forget(); // another version of the page stored it
}
connect().catch((error) => {
  $("model").textContent = "not connected";
  $("alert").textContent = error.message;
});
