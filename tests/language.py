"""Words and turns of phrase that this project does not use, and its words for them; see `tests/test_language.py`."""

from __future__ import annotations

import re

WORDS = {
    "residual": r"withheld",
    "automatically": r"chosen by itself",
    "estimated": r"told (?:within|against)",
    "stored": r"\bput by\b",
    "requested": r"\bas told\b",
    "peek, expect": r"\bforese(?:e|en|es|eing|eable)\b",
    "snapshot": r"\bdataset[./]mirror\b",
    "fetch watch": r"\bwitness\b",
    "listener": r"with ears",
}
"""What the field says → the private word of the first version. In code, too."""

PHRASES = {
    "again": r"\banew\b",
    "as usual": r"\bas ever\b",
    "permanently": r"\bfor ever\b",
    "without success": r"\bin vain\b",
    "gradually": r"\bby and by\b",
    "occasionally": r"\bnow and then\b",
    "during that time": r"\bmeanwhile\b",
    "released, dropped": r"\blets? go of\b|\bis let go\b|\bare let go\b",
    "name the thing": r"\bsuch (?:a|an) one\b",
    "name who says it": r"\b(?:is|are) (?:told|said)\b(?! to\b)|\bsays? so\b",
    "accel checks, looks at": r"\b(?:is|are|was|were) looked at\b",
    "also": r"(?:[.;] |, and |\bAnd )so (?:is|are|does|do|has|was|were) ",
    "subject first": r"(?:^|[.:] )(?:Refused|Not seen|Left out|Told|Missing) (?:is|are)\b",
    "name the thing, not 'What …'": r"(?:^|(?<=[.:;] ))What (?![^.?]*\?)(?:[^\s.?,]+ ){1,9}"
    r"(?:is|are|was|were|comes|keeps|stays|takes|gets|counts)\b",
    "proxy": r"\bstand-ins?\b",
    "is": r"\bstands? (?:in|there|beside)\b",
    "allows, supports": r"\bbears? (?:no|a|an|the|them|it)\b",
    "returns, yields": r"\bhands? out\b",
    "the owner first": r"\b(?:Trainer of transformers|run of Weights|logger of Lightning|optimizer of torch)\b",
}
"""What a native engineer writes → a pattern of what was written. In the manual, the front page and messages."""


def found(text: str, patterns: dict[str, str] | None = None) -> list[str]:
    """Return each use in a text, as "words (better: …)"; its code, tables of figures and links don't count."""
    return [
        f"{' '.join(match[0].split())!r} (better: {better})"
        for better, pattern in (patterns or {**WORDS, **PHRASES}).items()
        for match in re.finditer(pattern, text)
    ]


def prose(page: str) -> list[str]:
    """Return the paragraphs, list items and table cells of a page, without code and generated blocks."""
    page = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^(?: {4}|\t).*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`\n]*`", "`…`", page)
    page = re.sub(r"\]\([^)\s]*\)", "]", page)
    parts = re.split(r"\n\s*\n|\n(?=\s*[-|#>]|\s*\d+\. )| \| ", page)
    return [" ".join(part.strip("|-#> \n").split()) for part in parts if part.strip("|-#> \n:")]
