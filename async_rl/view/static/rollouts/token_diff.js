// Where two lists of tokens differ.

const MOST_CELLS = 4_000_000;

// Returns the length of the common prefix, and for each list which places have no partner in the other one.
export function compare(left, right) {
  let prefix = 0;
  while (prefix < Math.min(left.length, right.length) && left[prefix] === right[prefix]) prefix++;
  let suffix = 0;
  const shorter = Math.min(left.length, right.length) - prefix;
  while (suffix < shorter && left[left.length - 1 - suffix] === right[right.length - 1 - suffix]) suffix++;
  const partners = middle(left.slice(prefix, left.length - suffix), right.slice(prefix, right.length - suffix));
  return { prefix, left: places(left.length, prefix, partners.left), right: places(right.length, prefix, partners.right) };
}

function places(length, prefix, differs) {
  const found = new Array(length).fill(false);
  differs.forEach((value, place) => (found[prefix + place] = value));
  return found;
}

// The longest common subsequence; lists that would take too long differ everywhere.
function middle(left, right) {
  const differs = { left: new Array(left.length).fill(true), right: new Array(right.length).fill(true) };
  const width = right.length + 1;
  if (left.length * right.length > MOST_CELLS) return differs;
  const longest = new Uint16Array((left.length + 1) * width);
  for (let row = left.length - 1; row >= 0; row--) {
    for (let column = right.length - 1; column >= 0; column--) {
      const at = row * width + column;
      longest[at] = left[row] === right[column] ? longest[at + width + 1] + 1 : Math.max(longest[at + width], longest[at + 1]);
    }
  }
  for (let row = 0, column = 0; row < left.length && column < right.length; ) {
    const at = row * width + column;
    if (left[row] === right[column]) {
      differs.left[row++] = false;
      differs.right[column++] = false;
    } else if (longest[at + width] >= longest[at + 1]) row++;
    else column++;
  }
  return differs;
}
