"""Forms with files, byte by byte."""

BOUNDARY = "boundary"
FORM = {"content_type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(*parts):
    """A form of (name, file's name or None, content)."""
    lines = []
    for name, file, content in parts:
        named = f'; filename="{file}"' if file is not None else ""
        lines.append(
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"
        )
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()
