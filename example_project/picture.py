def write_picture(verdict, path): return path
