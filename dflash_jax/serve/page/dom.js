// What every part of the page needs: nodes, storage, numbers in words.

export const $ = (id) => document.getElementById(id);
export const say = (words) => ($("status").textContent = words);

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

// A browser may forbid storage; the page then forgets, and works.
export function recall(storage, name) {
  try {
    return window[storage].getItem(name) ?? "";
  } catch {
    return "";
  }
}

export function keep(storage, name, value) {
  try {
    window[storage].setItem(name, value);
  } catch {
    return;
  }
}

/** Whole from 10 ms on. */
export function milliseconds(number) {
  if (!Number.isFinite(number)) return "–";
  return `${number < 10 ? number.toFixed(1) : Math.round(number).toLocaleString("en")} ms`;
}

/** Three digits or so: 0.42, 7.31, 61.4, 238, 5,828. */
export function digits(number) {
  if (!Number.isFinite(number)) return "–";
  const decimals = number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return number.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
