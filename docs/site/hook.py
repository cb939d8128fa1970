"""Adds to mkdocs the pages of the sources that our pages link to.

On GitHub such a link opens the file or the folder. Here it opens a page with the
text of the file, or the list of the folder. The Python reference is added, too.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=\))")
# The modules of the Python reference.
MODULES = ["kvtwin", "kvtwin.campaign", "kvtwin.ci", "kvtwin.pytest_plugin",
           "kvtwin.transformers", "kvtwin.vllm"]
LANGUAGES = {".cc": "cpp", ".h": "cpp", ".c": "c", ".py": "python", ".go": "go",
             ".rs": "rust", ".yml": "yaml", ".txt": "text", ".sh": "sh"}


def target_of(link, page):
    """Returns the path in the repository to which the link of a page leads."""
    return posixpath.normpath(
        posixpath.join(posixpath.dirname(page.src_uri), link))


def source_page(target):
    """Returns the page of a source, or None if the site has the target itself."""
    if target.endswith((".md", ".png")):
        return None
    if (ROOT / target).is_file():
        return target + ".md"
    readme = (ROOT / target / "README.md").exists()
    return target + ("/README.md" if readme else "/folder.md")


def source_text(target):
    """Returns the Markdown of the page of a source."""
    path = ROOT / target
    if path.is_file():
        language = LANGUAGES.get(path.suffix, "text")
        return f"# {target}\n\n~~~~{language}\n{path.read_text()}\n~~~~\n"
    names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
    return f"# {target}\n\n" + "".join(f"- `{name}`\n" for name in names)


def on_files(files, config):
    """Adds the generated pages."""
    linked = {target_of(link, page) for page in files.documentation_pages()
              for link in LINK.findall(page.content_string)}
    for target in sorted(linked):
        page = source_page(target)
        if (page and (ROOT / target).exists()
                and not files.get_file_from_path(page)):
            files.append(
                File.generated(config, page, content=source_text(target)))
    search = pathlib.Path(__file__).with_name("file_search.js").read_text()
    files.append(File.generated(config, "assets/iframe-worker.js", content=search))
    files.append(File.generated(
        config, "python/reference.md",
        content="# Python\n\n" + "".join(f"::: {each}\n\n" for each in MODULES)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links to sources into links to their pages."""
    def turned(link):
        source = source_page(target_of(link[0], page.file))
        if source is None or not files.get_file_from_path(source):
            return link[0]
        return posixpath.relpath(source, posixpath.dirname(page.file.src_uri))
    return LINK.sub(turned, markdown)
