"use strict";
// Markdown as DOM nodes. No text is ever parsed as HTML, and a link leads to a web address or stays text.

const BLOCK = {
  fence: /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/,
  heading: /^ {0,3}(#{1,6})\s+/,
  rule: /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/,
  quote: /^ {0,3}> ?/,
  item: /^( *)(?:[-*+]|(\d{1,9})[.)])\s+/,
  columns: /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:?)? *$/,
};
const INLINE = new RegExp([
  "\\\\([!-/:-@[-`{-~])", // 1: an escaped mark
  "(`+)(.+?)(?<!`)\\2(?!`)", // 2, 3: code
  "(\\*\\*|__)(?=\\S)(.+?)(?<=\\S)\\4", // 4, 5: bold
  "(?<![\\w*])([*_])(?=[^\\s*_])(.+?)(?<=\\S)\\6(?![\\w*])", // 6, 7: italic
  "\\[([^\\]]+)\\]\\(([^()\\s]+)\\)", // 8, 9: a link
  "(https?://[^\\s<>()]*[^\\s<>().,:;!?'\"*_])", // 10: an address
].join("|"), "g");
const LONGEST_LINE = 5000; // longer lines have no marks, because the search for their ends takes quadratic time

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function webAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

class Markdown {
  // source: the text. put(parent, start, end): appends a part of the source to a node, as text.
  constructor(source, put) {
    this.source = source;
    this.put = put;
  }

  // The blocks from an offset on, as [offset, node]. Text that is appended later changes none but the last one.
  blocks(from) {
    const lines = [];
    for (let start = from; start < this.source.length;) {
      const stop = this.source.indexOf("\n", start);
      const end = stop < 0 ? this.source.length : stop;
      lines.push(this.line(start, end));
      start = end + 1;
    }
    return this.parse(lines);
  }

  line(start, end) {
    return { start, end, text: this.source.slice(start, end) };
  }

  parse(lines) {
    const found = [];
    for (let at = 0; at < lines.length;) {
      if (!lines[at].text.trim()) {
        at += 1;
        continue;
      }
      const [node, next] = this.block(lines, at);
      found.push([lines[at].start, node]);
      at = next;
    }
    return found;
  }

  block(lines, at) {
    const { text, start, end } = lines[at];
    let match;
    if ((match = BLOCK.fence.exec(text))) return this.code(lines, at, match);
    if ((match = BLOCK.heading.exec(text))) {
      const heading = element(`h${Math.min(match[1].length + 2, 6)}`);
      this.inline(heading, start + match[0].length, end);
      return [heading, at + 1];
    }
    if (BLOCK.rule.test(text)) return [element("hr"), at + 1];
    if (BLOCK.quote.test(text)) return this.quote(lines, at);
    if (BLOCK.item.test(text)) return this.list(lines, at);
    if (text.includes("|") && BLOCK.columns.test(lines[at + 1]?.text ?? "")) return this.table(lines, at);
    return this.paragraph(lines, at);
  }

  code(lines, at, [, mark, language]) {
    const ends = (line) => line.text.trim().startsWith(mark) && !line.text.trim().slice(mark.length).replaceAll(mark[0], "");
    const first = at + 1;
    let last = first;
    while (last < lines.length && !ends(lines[last])) last += 1;
    const block = element("div", "code");
    const code = element("code");
    const pre = element("pre");
    lines.slice(first, last).forEach((line, number, all) => {
      if (number) this.put(code, all[number - 1].end, all[number - 1].end + 1); // the line break
      this.put(code, line.start, line.end);
    });
    pre.tabIndex = 0;
    pre.append(code);
    const head = element("div", "code-head");
    head.append(element("span", "", language || "code"), copyButton(() => code.textContent));
    block.append(head, pre);
    return [block, last + 1];
  }

  quote(lines, at) {
    const inner = [];
    for (; at < lines.length && BLOCK.quote.test(lines[at].text); at += 1) {
      inner.push(this.line(lines[at].start + BLOCK.quote.exec(lines[at].text)[0].length, lines[at].end));
    }
    const quote = element("blockquote");
    quote.append(...this.parse(inner).map(([, node]) => node));
    return [quote, at];
  }

  list(lines, at) {
    const [, indent, number] = BLOCK.item.exec(lines[at].text);
    const list = element(number ? "ol" : "ul");
    if (number) list.start = Number(number);
    while (at < lines.length) {
      const match = BLOCK.item.exec(lines[at].text);
      if (!match || match[1].length > indent.length + 1 || Boolean(match[2]) !== Boolean(number)) break;
      const inner = [this.line(lines[at].start + match[0].length, lines[at].end)];
      for (at += 1; at < lines.length && this.belongs(lines, at, match[1].length); at += 1) {
        const { start, end, text } = lines[at];
        inner.push(this.line(start + Math.min(match[0].length, text.length - text.trimStart().length), end));
      }
      const item = element("li");
      const [first, ...others] = this.parse(inner).map(([, node]) => node);
      // A list without blank lines has no paragraphs.
      if (first?.tagName === "P") item.append(...first.childNodes, ...others);
      else item.append(...(first ? [first, ...others] : []));
      list.append(item);
      while (at < lines.length && !lines[at].text.trim() && BLOCK.item.test(this.afterBlank(lines, at))) at += 1;
    }
    return [list, at];
  }

  // Whether a line is a part of an item whose mark has this indentation.
  belongs(lines, at, indent) {
    const text = lines[at].text.trim() ? lines[at].text : this.afterBlank(lines, at);
    const isDeeper = text.length - text.trimStart().length > indent;
    const continues = lines[at].text.trim() && lines[at - 1].text.trim() && !this.startsBlock(text);
    return Boolean(text) && (isDeeper || continues);
  }

  afterBlank(lines, at) {
    return lines.slice(at).find((line) => line.text.trim())?.text ?? "";
  }

  startsBlock(text) {
    return ["fence", "heading", "rule", "quote", "item"].some((name) => BLOCK[name].test(text));
  }

  table(lines, at) {
    const table = element("table");
    const row = (line, tag) => {
      const made = element("tr");
      for (const cell of line.text.matchAll(/[^|\s](?:[^|]*[^|\s])?/g)) {
        const node = element(tag);
        this.inline(node, line.start + cell.index, line.start + cell.index + cell[0].length);
        made.append(node);
      }
      table.append(made);
    };
    row(lines[at], "th");
    for (at += 2; at < lines.length && lines[at].text.includes("|"); at += 1) row(lines[at], "td");
    const frame = element("div", "table");
    frame.append(table);
    return [frame, at];
  }

  paragraph(lines, at) {
    const paragraph = element("p");
    const first = at;
    do {
      if (at > first) paragraph.append(element("br"));
      this.inline(paragraph, lines[at].start, lines[at].end);
      at += 1;
    } while (at < lines.length && lines[at].text.trim() && !this.startsBlock(lines[at].text));
    return [paragraph, at];
  }

  inline(parent, start, end) {
    const text = this.source.slice(start, end);
    let done = start;
    if (text.length <= LONGEST_LINE) {
      for (const match of text.matchAll(INLINE)) {
        const at = start + match.index;
        this.put(parent, done, at);
        this.mark(parent, match, at);
        done = at + match[0].length;
      }
    }
    this.put(parent, done, end);
  }

  mark(parent, match, at) {
    const end = at + match[0].length;
    const address = webAddress(match[9] ?? match[10] ?? "");
    if (match[1]) {
      this.put(parent, at + 1, end);
    } else if (match[2]) {
      this.put(parent.appendChild(element("code")), at + match[2].length, end - match[2].length);
    } else if (match[4]) {
      this.inline(parent.appendChild(element("strong")), at + 2, end - 2);
    } else if (match[6]) {
      this.inline(parent.appendChild(element("em")), at + 1, end - 1);
    } else if (address) {
      const link = parent.appendChild(element("a"));
      link.href = address;
      link.target = "_blank";
      link.rel = "noopener noreferrer";
      const shown = match[8] ? at + 1 : at;
      this.put(link, shown, match[8] ? shown + match[8].length : end);
    } else {
      this.put(parent, at, end);
    }
  }
}

function copyButton(text) {
  const button = element("button", "link copy", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    await copyText(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copyText(text) {
  // Browsers offer the clipboard to pages of the own machine and to those over TLS only.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
