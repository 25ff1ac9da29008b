// The book has the pages of docs/. Links from them to other files of the repository become text.
for (const link of document.querySelectorAll("main a[href^='../']")) link.replaceWith(...link.childNodes);
