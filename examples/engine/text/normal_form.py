#!/usr/bin/env python3
"""Writes normal_form.inc: what Unicode says of characters that normal form C may move or replace, from Python's unicodedata.

Usage: normal_form.py > normal_form.inc
"""
import sys
import unicodedata

REPLACED = 255  # not in normal form C by itself, or may become one with what stands before it


def class_of(code):
    """The canonical combining class; REPLACED for what the form replaces or may compose with its forerunner."""
    letter = chr(code)
    if 0xD800 <= code < 0xE000:
        return 0
    if unicodedata.normalize("NFC", letter) != letter or code in SECOND:
        return REPLACED
    return unicodedata.combining(letter)


# What stands second in a pair that composes, Hangul's vowels and final consonants among them.
SECOND = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
for code in range(sys.maxunicode + 1):
    parts = unicodedata.decomposition(chr(code)).split()
    if len(parts) == 2 and not parts[0].startswith("<") and unicodedata.normalize("NFC", chr(code)) == chr(code):
        SECOND.add(int(parts[1], 16))

runs = []
for code in range(sys.maxunicode + 1):
    found = class_of(code)
    if found and runs and runs[-1][1] == code - 1 and runs[-1][2] == found:
        runs[-1][1] = code
    elif found:
        runs.append([code, code, found])
line = ""
print(f"// Made by normal_form.py from Unicode {unicodedata.unidata_version}: first, last, class.")
for first, last, found in runs:
    item = f"{{{first:#x}, {last:#x}, {found}}},"
    if len(line) + len(item) > 118:
        print(line)
        line = ""
    line += (" " if line else "") + item
print(line)
