import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.framework.recipes.locks.Revoker;
import org.apache.curator.retry.RetryForever;

/**
 * Curator as a contender: `hold`, `read`, `write` until a line comes in, `downgrade` between two lines, `revocable` saying so
 * when it is asked to let go, `revoke` to ask whoever has a node, or `loop` through a section that nobody else may be in.
 */
class Contender {
    public static void main(String[] args) throws Exception {
        CuratorFramework client =
                CuratorFrameworkFactory.newClient(args[1], 4000, 4000, new RetryForever(50));
        client.start();
        String what = args[0];
        InterProcessReadWriteLock both = new InterProcessReadWriteLock(client, args[2]);
        InterProcessMutex mutex = new InterProcessMutex(client, args[2]);
        if (what.equals("read")) {
            mutex = both.readLock();
        } else if (what.equals("write") || what.equals("downgrade")) {
            mutex = both.writeLock();
        } else if (what.equals("revocable")) {
            mutex.makeRevocable(asked -> System.out.println("asked"));
        }
        System.out.println("ready");
        if (what.equals("loop")) {
            Path section = Path.of(args[3]);
            for (int turn = 0; turn < Integer.parseInt(args[4]); turn++) {
                mutex.acquire();
                try {
                    Files.createFile(section);
                    Thread.sleep(2);
                    Files.delete(section);
                } catch (FileAlreadyExistsException together) {
                    System.out.println("together");
                } finally {
                    mutex.release();
                }
            }
            System.out.println("done");
        } else if (what.equals("revoke")) {
            Revoker.attemptRevoke(client, args[2]);
            System.out.println("done");
        } else {
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            mutex.acquire();
            System.out.println("held");
            lines.readLine();
            if (what.equals("downgrade")) {
                both.readLock().acquire();
                mutex.release();
                mutex = both.readLock();
                System.out.println("downgraded");
                lines.readLine();
            }
            mutex.release();
            System.out.println("released");
        }
        client.close();
    }
}
